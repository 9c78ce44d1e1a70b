#!/usr/bin/env bash
# Run the tests, from a fresh clone too: makes or uses a virtual environment, installs what is
# missing, and passes its arguments on to pytest.
#
#     bash tests/run_all_tests.sh [--latest] [PYTEST ARGUMENTS]
#
# `--latest` as the first argument runs the tests with the newest releases of all dependencies
# instead of those in constraints.txt, in `.venv-latest`.
#
# Three workers for two cores, four at most, each of which takes a file of tests at a time (`-n 0`:
# none): a fifth of the time tests wait for processes, connections and leases.
# A test that fails is run once more, since hundreds of them drive real processes against real time
# on machines that others use too. What passes only then is listed as RERUN: a defect to look into.
# Coverage is measured on request (`--cov --cov-report=term:skip-covered`), since tracing makes the
# interpreted kernels five times slower.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source sample_configs/launch/bootstrap.sh
if [ "${1:-}" = --latest ]; then
    shift
    bootstrap dev --latest
else
    bootstrap dev
fi
# Compiled modules are kept, whatever the environment says: hundreds of processes import the same
# ones, and to compile those with tests takes longer than to collect them.
unset PYTHONDONTWRITEBYTECODE
# One compute thread per test process: with more, they fight over the few cores there are.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Every process would read the authorities of the system and look for plugins of pydantic in every
# installed package, which takes 0.15 s of CPU. No test calls a public server.
export SSL_CERT_FILE="$PWD/tests/support/no_authority.pem" SSL_CERT_DIR=/nonexistent
export PYDANTIC_DISABLE_PLUGINS=1
workers=$("$PYTHON" -c 'import os; print(max(1, min(4, 3 * (os.cpu_count() or 1) // 2)))')
exec "$PYTHON" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder \
    --reruns 1 -rR --durations=15 "$@"
