#!/usr/bin/env bash
# ServeCore and one engine with the embedded model, on the CPU: port 9000 until Ctrl-C.
#
#     bash sample_configs/launch/launch_embedded.sh [--log_dir DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
bootstrap engine
exec "$PYTHON" -m parrot.cli launch \
    "$ROOT/sample_configs/core/localhost.json" \
    "$ROOT/sample_configs/engine/embedded.json" \
    "$@"
