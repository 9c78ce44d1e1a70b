#!/usr/bin/env bash
# Run the tests, from a fresh clone too: makes or uses a virtual environment, installs what is
# missing, and passes its arguments on to pytest.
#
#     bash tests/run_all_tests.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source sample_configs/launch/bootstrap.sh
bootstrap dev
# One compute thread per test process: with more, they fight over the few cores there are.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m pytest --cov --cov-report=term:skip-covered --durations=15 "$@"
