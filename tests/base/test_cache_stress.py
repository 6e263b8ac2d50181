"""The stress of the disk cache (`python -m bench cache_stress`), small."""

from bench import cache_stress


def test_processes_at_once_build_once_and_kills_leave_whole_entries(monkeypatch):
    whole = cache_stress.programs
    monkeypatch.setattr(cache_stress, "programs", lambda salt: {"scan": whole(salt)["scan"]})
    rows = cache_stress.run(processes=2, kills=6, compiling=0, faults=False)
    assert [row["right"] for row in rows] == [True] * 2, rows


def test_a_full_disk_is_told_and_the_program_is_right(monkeypatch, tmp_path):
    monkeypatch.setattr(cache_stress, "programs", lambda salt: {"one": lambda x, w: (x * salt).sin() + w})
    folder = tmp_path / "file"
    folder.write_text("")
    found = cache_stress.Child(folder, lambda: cache_stress.run_programs(0.37)).result()
    assert cache_stress._told(found, "DM310")["right"], found
