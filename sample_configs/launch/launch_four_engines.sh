#!/usr/bin/env bash
# ServeCore and four engines with the embedded model, one CPU thread each.
#
#     bash sample_configs/launch/launch_four_engines.sh [--log_dir DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
bootstrap engine
exec "$PYTHON" -m parrot.cli launch \
    "$ROOT/sample_configs/launch/four_engines.json" \
    "$@"
