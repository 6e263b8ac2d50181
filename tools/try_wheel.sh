#!/bin/sh
# A wheel as a new user has it: a clean environment outside of the repository, the first page of the documents with and
# without a C++ compiler, the doctor, the command.
#   tools/try_wheel.sh PYTHON WHEEL [FOLDER OF AN ENVIRONMENT TO USE AGAIN]      TORCH=2.14.1 takes another PyTorch
set -eu
python=${1:?usage: tools/try_wheel.sh PYTHON WHEEL [ENVIRONMENT]}
wheel=$(realpath "${2:?which wheel?}")
root=$(realpath "$(dirname "$0")/..")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
environment=${3:-$folder/environment}
unset PYTHONPATH
test -x "$environment/bin/python" || "$python" -m venv "$environment"
pip() { "$environment/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q "torch==${TORCH:-2.13.0}"
pip install -q --force-reinstall --no-deps "$wheel"
pip install -q "$wheel[report]"
pip check
cd "$folder"
cat > page.py <<'END'
import pathlib, re, sys
import dynamotor
assert "site-packages" in dynamotor.__file__, dynamotor.__file__
text = pathlib.Path(sys.argv[1]).read_text()
for n, snippet in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
    path = pathlib.Path(f"snippet{n}.py")
    path.write_text(snippet)
    exec(compile(snippet, str(path), "exec"), {"__name__": "__main__"})
assert pathlib.Path("report.html").stat().st_size > 10_000
END
DYNAMOTOR_CACHE_DIR="$folder/with" "$environment/bin/python" page.py "$root/docs/index.md"
PATH="$environment/bin" DYNAMOTOR_CACHE_DIR="$folder/without" "$environment/bin/python" page.py "$root/docs/index.md" 2> messages || {
    cat messages
    exit 1
}
grep -q DM301 messages || { cat messages; echo "no message says that there is no compiler"; exit 1; }
"$environment/bin/dynamotor" --version
"$environment/bin/python" -m dynamotor doctor
echo "the wheel works: $wheel"
