# Sourced by scripts/smoke and scripts/test. Finds Python 3.12, makes .venv, installs from constraints.
# Does nothing when .venv was made from the same pyproject.toml and constraints.
# MEGATRON_DET_VENV names another place for the virtual environment (default: .venv beside this checkout).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${MEGATRON_DET_VENV:-$root/.venv}
python=$venv/bin/python

say() { printf '== %s\n' "$*"; }

find_python() {
    local candidate
    for candidate in "${MEGATRON_DET_PYTHON:-}" python3.12 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3 python3 python3.13; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] < (3, 12))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    printf 'DET-SETUP: no Python >= 3.12 with venv found. megatron-core 0.19 needs it.\n' >&2
    printf 'Do: install python3.12 (or pyenv install 3.12), or set MEGATRON_DET_PYTHON to one.\n' >&2
    return 2
}

install() {
    local stamp=$venv/.installed-from wanted base
    wanted=$(cat "$root/pyproject.toml" "$root/configs/constraints.txt" | sha256sum | cut -d' ' -f1)-$root
    if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        say "environment: $venv is up to date"
        return 0
    fi
    base=$(find_python) || return 2
    say "environment: making $venv with $("$base" --version) (torch with its CUDA libraries: 5.4 GB, about two minutes)"
    "$base" -m venv "$venv" || return 2
    "$python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/configs/constraints.txt" --editable "$root[smoke,dev]" || return 2
    printf '%s\n' "$wanted" > "$stamp"
    say "environment: ready"
}

install || exit 2
export PATH=$venv/bin:$PATH
cd "$root" || exit 2
