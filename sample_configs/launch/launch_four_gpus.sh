#!/usr/bin/env bash
# ServeCore and four engines with Llama-3.1-8B, one per GPU.
#
#     bash sample_configs/launch/launch_four_gpus.sh [--log_dir DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
bootstrap engine
exec "$PYTHON" -m parrot.cli launch \
    "$ROOT/sample_configs/launch/four_gpus.json" \
    "$@"
