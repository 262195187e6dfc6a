#!/bin/sh
# Prints the first Python >= 3.10 that runs and can make a virtual environment. A name on the PATH may be a version
# manager's shim that fails, so each is tried.
for python in ${1:-python3.12 python3.11 python3.10 python3.13 python3}; do
  if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
    command -v "$python"
    exit 0
  fi
done
echo "No Python 3.10 or newer with the venv module was found: install one (Debian: apt-get install python3-venv)," \
  "or run make PYTHON=/path/to/python3." >&2
exit 1
