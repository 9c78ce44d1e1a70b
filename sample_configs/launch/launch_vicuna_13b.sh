#!/usr/bin/env bash
# ServeCore and Vicuna-13B on one GPU with at least 40 GB.
#
#     bash sample_configs/launch/launch_vicuna_13b.sh [--log_dir DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
bootstrap engine
exec "$PYTHON" -m parrot.cli launch \
    "$ROOT/sample_configs/core/localhost.json" \
    "$ROOT/sample_configs/engine/vicuna_13b.json" \
    "$@"
