#!/usr/bin/env bash
# Train the captioning model on several machines with Lockstep's own launcher. Run the same command on every machine:
# it needs no --node_rank. A machine that is lost is noticed, and one that comes back joins with the same command.
#
# Usage: ./train_multinode.sh --num_nodes 2 --master_addr 10.0.0.1 --num_gpus 4 --config config.yaml run_dir=/shared/run
#
#   --num_nodes M      machines (default 1)
#   --master_addr H    address of one of them, which then coordinates
#   --master_port P    a port that is free there (default 29400)
#   --num_gpus N       processes on this machine (default: the GPUs that nvidia-smi shows)
#   --config F.yaml    a file of settings
#
# run_dir=FOLDER must be a folder that all machines see. With `-- --resume auto` a run continues that has begun there.
set -euo pipefail
# shellcheck source=options.sh
source "$(dirname "$0")/options.sh"

read_options "num_gpus config num_nodes master_addr master_port" "$@"
WORDS=(train pixel_llm --nproc "$NUM_GPUS")
if [[ -n $CONFIG ]]; then WORDS+=(--config "$CONFIG"); fi
if ((NUM_NODES > 1)); then
  [[ " ${REST[*]} " == *" run_dir="* || -n $CONFIG ]] || fail "several machines need run_dir=FOLDER, which all of them see"
  WORDS+=(--nnodes "$NUM_NODES" --join "$MASTER_ADDR:${MASTER_PORT:-29400}")
fi
exec lockstep "${WORDS[@]}" "${REST[@]}"
