# What the Slurm files share: every machine of the job starts a command on the job's GPUs with torchrun. After a signal
# (the time limit, preemption) it saves, and the job goes back into the queue, until the command is finished.
#   launch MODULE [FLAGS]
# The user may set BASE (outputs, in a folder that all machines share) and ENV_PYTHON (the interpreter).
# shellcheck shell=bash

set -euo pipefail

BASE=${BASE:-out}
STOPPED=143 # the exit code after a signal, as of any command that SIGTERM ends
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

launch() {
  local code=0 hosts meet=(--standalone)
  if [ "${SLURM_NNODES:?is set by Slurm: start this file with sbatch}" -gt 1 ]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    meet=(--nnodes "$SLURM_NNODES" --rdzv-backend c10d --rdzv-id gka
      --rdzv-endpoint "${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 10000))")
  fi
  trap : TERM # Slurm signals the tasks. srun must not get the signal: it kills its tasks then
  # srun takes the cores of a task from its own flag alone.
  srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    "${ENV_PYTHON:-.venv/bin/python}" -m trainkit_gka.torchrun "${meet[@]}" --max-restarts 3 \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" -m -- "$@" || code=$?
  if [ $code -ne $STOPPED ]; then
    exit $code
  fi
  # scancel has ended the job by now: it is not to come back.
  if [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
}
