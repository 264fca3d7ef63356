#!/bin/bash
# Start a quick training run on several ranks, from systems/latent_wire:
#
#   NUM_GPUS=2 bash finalization/launch_ddp_training.sh
#   NUM_GPUS=4 bash finalization/launch_ddp_training.sh preset=gpu run_dir=runs/four
#
# NUM_GPUS is the number of ranks; the default is one for each GPU, or one without GPUs. Arguments of the script are
# settings of the run or flags of latentwire/train.py.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${NUM_GPUS:-}" ]; then
    NUM_GPUS=$(python -c 'from lockstep.runtime.host.resources import visible_gpus; print(max(1, visible_gpus()))')
fi
case " $* " in
*" preset="*) ;;
*) set -- preset=tiny "$@" ;; # takes seconds
esac
exec python -m torch.distributed.run --standalone --nproc_per_node="$NUM_GPUS" \
    "$root/latentwire/train.py" --elastic_gpu "$@"
