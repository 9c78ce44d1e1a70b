#!/usr/bin/env bash
# ServeCore and Qwen3-8B on one GPU.
#
#     bash sample_configs/launch/launch_qwen3_8b.sh [--log_dir DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
bootstrap engine
exec "$PYTHON" -m parrot.cli launch \
    "$ROOT/sample_configs/core/localhost.json" \
    "$ROOT/sample_configs/engine/qwen3_8b.json" \
    "$@"
