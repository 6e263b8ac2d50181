#!/bin/sh
# The wheels as a new user has them: a clean environment outside of the repository, the first page of the documents with and
# without a C++ compiler, the doctor, the command. First dynamotor alone, then with dynamotor-xla.
#   tools/try_wheel.sh PYTHON WHEEL XLA_WHEEL [FOLDER OF AN ENVIRONMENT TO USE AGAIN]      TORCH=2.14.1 takes another PyTorch
set -eu
usage="usage: tools/try_wheel.sh PYTHON WHEEL XLA_WHEEL [ENVIRONMENT]"
python=${1:?$usage}
wheel=$(realpath "${2:?$usage}")
xla_wheel=$(realpath "${3:?$usage}")
root=$(realpath "$(dirname "$0")/..")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
environment=${4:-$folder/environment}
unset PYTHONPATH
test -x "$environment/bin/python" || "$python" -m venv "$environment"
pip() { "$environment/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -q "torch==${TORCH:-2.13.0}"
pip uninstall -q -y dynamotor-xla
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
if "$environment/bin/python" -c "import dynamotor.xla" 2> messages; then
    echo "dynamotor.xla is there without dynamotor-xla"
    exit 1
fi
grep -q DM690 messages || { cat messages; exit 1; }

pip install -q --force-reinstall --no-deps "$xla_wheel"
pip install -q --find-links "$(dirname "$wheel")" --find-links "$(dirname "$xla_wheel")" "$wheel[xla]"
pip check
cat > train.py <<'END'
import torch, torch_xla, dynamotor
assert "site-packages" in torch_xla.__file__, torch_xla.__file__
assert {"xla", "openxla"} <= set(dynamotor.list_backends()) and "dynamotor_xla" in torch._dynamo.list_backends()
model = torch.nn.Linear(4, 2).to("xla")
x = torch.randn(3, 4, device="xla")
for fast in (dynamotor.compile(model, backend="xla"), torch.compile(model, backend="xla")):
    torch.testing.assert_close(fast(x).cpu(), model(x).cpu())
END
"$environment/bin/dynamotor" run --torch-xla train.py
"$environment/bin/python" -m dynamotor doctor | grep "^xla: compiles"
pip uninstall -q -y dynamotor-xla
"$environment/bin/python" -c "import dynamotor"
echo "the wheels work: $wheel $xla_wheel"
