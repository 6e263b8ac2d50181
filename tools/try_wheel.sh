#!/bin/sh
# A wheel as a new user has it: a clean environment outside of the repository, the quickstart, the doctor, a report.
#   tools/try_wheel.sh PYTHON WHEEL [FOLDER OF AN ENVIRONMENT TO USE AGAIN]
set -eu
python=${1:?usage: tools/try_wheel.sh PYTHON WHEEL [ENVIRONMENT]}
wheel=$(realpath "${2:?which wheel?}")
root=$(realpath "$(dirname "$0")/..")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
environment=${3:-$folder/environment}
test -x "$environment/bin/python" || "$python" -m venv "$environment"
"$environment/bin/python" -m pip --disable-pip-version-check -q install torch==2.13.0
"$environment/bin/python" -m pip --disable-pip-version-check -q install "$wheel[report]"
cd "$folder"
export DYNAMOTOR_CACHE_DIR="$folder/cache"
"$environment/bin/python" - "$root/docs/index.md" <<'END'
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
"$environment/bin/python" -m dynamotor doctor
echo "the wheel works: $wheel"
