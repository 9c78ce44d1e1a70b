#!/usr/bin/env bash
# ServeCore and Vicuna-7B on one GPU (16 GB of weights in the model hub's cache).
#
#     bash sample_configs/launch/launch_vicuna_7b.sh [--log_dir DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
bootstrap engine
exec "$PYTHON" -m parrot.cli launch \
    "$ROOT/sample_configs/core/localhost.json" \
    "$ROOT/sample_configs/engine/vicuna_7b.json" \
    "$@"
