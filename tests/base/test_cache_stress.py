"""The stress of the disk cache (`python -m bench cache_stress`), small."""

import pytest
from children import run_forked

# Children are forked, which a process that has run a backward must not do: hence one of its own.
PROGRAM = """
import pathlib, sys
from bench import cache_stress

whole = cache_stress.programs
cache_stress.programs = lambda salt: {"scan": whole(salt)["scan"]}
rows = cache_stress.run(processes=2, kills=6, compiling=0, faults=False)
assert [row["right"] for row in rows] == [True] * 2, rows

cache_stress.programs = lambda salt: {"one": lambda x, w: (x * salt).sin() + w}
no_folder = pathlib.Path(sys.argv[1])
no_folder.write_text("")
found = cache_stress.Child(no_folder, lambda: cache_stress.run_programs(0.37)).result()
assert cache_stress._told(found, "DM310")["right"], found
"""


@pytest.mark.slow
def test_processes_at_once_kills_and_a_folder_that_cannot_be_written_are_survived(tmp_path):
    done = run_forked(PROGRAM, str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
