#!/bin/bash
# Peers of a run as jobs of SLURM, each by itself: no job waits for another one, and any of them may end at any time.
#
#     sbatch --array=0-7 examples/cluster/slurm.sh 'flockstep://…?via=…'
#
# A job is one peer with all GPUs of its node. Its home folder, with its key and state, is that of its place in the array, so that
# it goes on after it was requeued. Two minutes before its time is over it leaves the run in order and is queued again; a
# preempted job, which gets SIGTERM, leaves in order too, and SLURM queues it again. When the run is over the job is.
#SBATCH --job-name=flockstep
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
set -u
link=${1:?the link of the run, in quotes}
home=${FLOCKSTEP_HOMES:-$HOME/flockstep-homes}/${SLURM_ARRAY_TASK_ID:-0}
mkdir -p "$home"

asked=
trap 'caught=1 asked=1; kill -TERM "$peer"' USR1
trap 'caught=1; kill -TERM "$peer"' TERM
if [ "${SLURM_GPUS_ON_NODE:-1}" -gt 1 ]; then
    torchrun --standalone --nproc-per-node "$SLURM_GPUS_ON_NODE" -m flockstep join "$link" --home "$home" --yes &
else
    flockstep join "$link" --home "$home" --yes &
fi
peer=$!
caught=1
while [ -n "$caught" ]; do # A signal ends a wait, not the peer; the shell knows how the peer ended, however often it is asked.
    caught=
    wait "$peer"
    code=$?
done
[ -z "$asked" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
