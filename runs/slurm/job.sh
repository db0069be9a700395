# What the Slurm files share: every machine of the job runs one experiment of runs/ on the job's GPUs. After a signal
# (the time limit, preemption) it saves, and the job goes back into the queue, until the experiment is finished.
#   run_experiment MODULE [FLAGS]
# Set by the user: BASE (outputs, in a folder that all machines share), ENV_PYTHON (the interpreter).
# shellcheck shell=bash

set -euo pipefail

BASE=${BASE:-out}
ENV_PYTHON=${ENV_PYTHON:-.venv/bin/python}
STOPPED=143 # the exit code after a signal, as of any command that SIGTERM ends
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

run_experiment() {
  local code=0 meet="--standalone" hosts
  if [ "${SLURM_NNODES:?is set by Slurm: start this file with sbatch}" -gt 1 ]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    meet="--nnodes $SLURM_NNODES --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID"
    meet+=" --rdzv-endpoint ${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 10000))"
  fi
  trap : TERM # Slurm signals the tasks. srun must not get the signal: it kills its tasks then
  # srun takes the cores of a task from its own flag alone.
  srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "$ENV_PYTHON" -m "$1" --base "$BASE" \
    --ngpu "${SLURM_GPUS_ON_NODE:-1}" --torchrun="$meet --max-restarts 3" "${@:2}" || code=$?
  if [ $code -ne $STOPPED ]; then
    exit $code
  fi
  # scancel has ended the job by now: it is not to come back.
  if [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
}
