"""A run of real processes that waits for voters, and what its owner sees and does about it."""

from pathlib import Path

from flockstep.peer.base.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.scripts.runs.run import create_run
from integration.test_keep import HERE, event_of, join, processes
from support.bootstraps import TINY_RUN
from support.commands import Command, flockstep


def test_the_owner_appoints_who_is_left_of_a_run_that_waits(bootstrap_address: str, tmp_path: Path) -> None:
    owner, other, stranger = (tmp_path / name for name in ("owner", "other", "stranger"))
    lost = Identity.load_or_create(other / "identity.key").peer_id
    toml = tmp_path / "run.toml"
    toml.write_text(f'{TINY_RUN}[admission]\nkeepers = "{lost}"\n')
    config = PeerConfig(home=owner, host="127.0.0.1", port=0)
    link = create_run(toml, [bootstrap_address], config, lambda line: None)
    with processes() as started:
        keepers = [Command("keep", link, "--home", str(home), *HERE, "--json", "--yes") for home in (owner, other)]
        peer = join(link, tmp_path / "anna")
        started += [*keepers, peer]
        event_of(peer, "round.done", 2)
        early = flockstep("run", "appoint", link, "--home", str(owner))
        assert (early.returncode, "has not stalled: 2 of 2 votes are here" in early.stderr) == (2, True)
        keepers[1].kill()
        stalled = event_of(keepers[0], "agreement.stalled", 2)
        shown = flockstep("status", link, "--home", str(stranger))
        assert f"waits for {lost[-8:]}" in shown.stdout
        refused = flockstep("run", "appoint", link, "--home", str(stranger))
        assert (refused.returncode, "only the run's owner may make it" in refused.stderr) == (2, True)
        assert len(refused.stderr.strip().splitlines()) <= 2
        made = flockstep("run", "appoint", link, "--home", str(owner))
        assert f"missing  {lost}" in made.stdout
        assert f"Term 1 of round {stalled['round']} is appointed" in made.stdout
        assert event_of(keepers[0], "agreement.appointed")["step"] == "term 1"
        assert event_of(peer, "round.done", stalled["round"] + 1)["round"] > stalled["round"]
