# Sourced by the scripts beside it: one virtual environment, .venv, beside the checkout, with every version pinned.
#
#     . "$(dirname "$0")/environment.sh"
#     set_up_environment          # what flockstep needs to run
#     set_up_environment dev      # and what its tests need
#
# Leaves $root (the checkout) and $python (the environment's interpreter) behind, and the current folder at $root.

# Hundreds of processes of the tests would each compile all modules again.
unset PYTHONDONTWRITEBYTECODE

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd) || exit 1
cd "$root" || exit 1

fail() {
    printf '%s\n' "$1" >&2
    exit 1
}

find_base() {
    for candidate in python3.13 python3.12 python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail 'flockstep needs Python 3.11 or newer, and none is on the PATH: install one from https://www.python.org/downloads'
}

find_interpreter() {
    python=.venv/bin/python
    [ ! -d .venv/Scripts ] || python=.venv/Scripts/python # Windows
}

# What pip does, without what takes no time: large downloads with their size, and its steps. False if its last word is "failed".
show_progress() {
    found=0
    while read -r verb what size; do
        case "$verb $size" in
        Collecting*)
            found=$((found + 1))
            [ $((found % 10)) != 0 ] || printf '  found %d packages\n' "$found" >&2
            ;;
        Downloading*MB\)* | Downloading*GB\)*) printf '  downloading %s %s\n' "${what##*/}" "$size" >&2 ;;
        Installing*packages:*) printf '  unpacking %d packages: the last step, up to a minute\n' "$found" >&2 ;;
        esac
    done
    [ "$verb" != failed ]
}

set_up_environment() {
    extras=${1:+[$1]}
    stamp=.venv/installed$extras
    # The folder is part of it, since an editable install points to where the checkout stood.
    wanted=$(printf '%s ' "$root" && cat constraints.txt pyproject.toml | cksum)
    find_interpreter
    for done in "$stamp" '.venv/installed[dev]'; do # What the tests need is more than what a peer needs.
        if [ "$(cat "$done" 2>/dev/null)" = "$wanted" ] && "$python" -c '' 2>/dev/null; then
            return
        fi
    done
    printf 'Installing flockstep%s into .venv (once; a few minutes) …\n' "$extras" >&2
    if ! "$python" -c '' 2>/dev/null; then
        base=$(find_base) || exit 1
        "$base" -m venv --clear .venv || fail "$base cannot make a virtual environment: on Debian or Ubuntu, apt install python3-venv"
        find_interpreter
    fi
    # Modules are compiled when they are first imported: compiling all of them takes longer than the installation.
    { "$python" -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e ".$extras" || printf failed; } |
        show_progress || fail 'The installation failed; pip says why above. With the network back, start the same command again.'
    "$python" -c 'import flockstep.optim.train.trainer' # Processes that start together would each compile the same modules.
    printf '%s' "$wanted" >"$stamp"
}
