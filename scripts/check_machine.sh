#!/usr/bin/env bash
# Has this machine what Baton's virtual environment needs? One line saying what to do if not. Argument: the interpreter.
set -euo pipefail
python=$1

fail() { echo "baton: $1" >&2; exit 2; }

command -v "$python" >/dev/null || fail "no $python here: install Python 3.11 or newer (Debian: apt install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version 2>&1) is too old: install Python 3.11 or newer, then make PYTHON=python3.11 setup"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python can't make virtual environments: apt install python3-venv (Debian), or your system's package for venv"
command -v "${CXX:-g++}" >/dev/null ||
    echo "baton: no C++ compiler (${CXX:-g++}): models will be computed by slower torch code; apt install g++ (Debian) mends it" >&2
