"""Folders and archives that want to reach beyond themselves."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import skills.interop.files
from distill.errors import DataError
from skills.interop import export_folder, import_path
from skills.items import SkillItem

GOOD = "---\nname: a\ndescription: d\n---\nBody\n"


def tree(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(GOOD.replace("name: a", f"name: {path.parent.name}"))


def test_links_are_never_followed(tmp_path: Path) -> None:
    secret = tmp_path / "outside" / "SKILL.md"
    tree(tmp_path / "outside" / "..", "outside/SKILL.md")
    inside = tmp_path / "inside"
    tree(inside, "good/SKILL.md")
    (inside / "file").mkdir()
    (inside / "file" / "SKILL.md").symlink_to(secret)
    (inside / "folder").symlink_to(secret.parent)
    (inside / "loop").symlink_to(inside)
    (inside / "bank.lock.json").symlink_to(secret)
    found = import_path(inside)
    assert [i.id for i in found.items] == ["good"]
    assert sorted(where for where, _ in found.skipped) == [
        *("bank.lock.json", "file/SKILL.md", "folder", "loop"),
    ]
    assert all("links are not followed" in why for _, why in found.skipped)
    with pytest.raises(DataError, match="link"):
        import_path(inside / "file" / "SKILL.md")


def test_special_large_and_binary_files_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skills.interop.files, "MAX_BYTES", 1000)
    tree(tmp_path, "good/SKILL.md", "large/SKILL.md", "binary/SKILL.md", "zero/SKILL.md")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "SKILL.md")
    (tmp_path / "large" / "SKILL.md").write_text(GOOD + "x" * 1000)
    (tmp_path / "binary" / "SKILL.md").write_bytes(b"---\nname: \xff\n")
    (tmp_path / "zero" / "SKILL.md").write_text(GOOD + "\0")
    found = import_path(tmp_path)
    assert [i.id for i in found.items] == ["good"]
    reasons = dict(found.skipped)
    assert "ordinary" in reasons["pipe/SKILL.md"]
    assert "larger than 1000" in reasons["large/SKILL.md"]
    assert "UTF-8" in reasons["binary/SKILL.md"]
    assert "zero byte" in reasons["zero/SKILL.md"]


def test_the_walk_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "a/SKILL.md", "1/2/3/4/5/6/7/deep/SKILL.md", ".git/b/SKILL.md")
    tree(tmp_path, "node_modules/c/SKILL.md", "a/nested/SKILL.md")
    found = import_path(tmp_path)
    assert [i.id for i in found.items] == ["a"]
    assert "deeper than 6" in found.warnings[0]
    monkeypatch.setattr(skills.interop.files, "MAX_FOLDERS", 3)
    assert any("stopped after 3" in w for w in import_path(tmp_path).warnings)


def make_zip(path: Path, members: dict[str, str], links: tuple[str, ...] = ()) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            info = zipfile.ZipInfo(name)
            if name in links:
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, text)
    return path


def make_tar(path: Path, members: dict[str, str], links: tuple[str, ...] = ()) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            data = text.encode()
            if name in links:
                info.type, info.linkname, data = tarfile.SYMTYPE, text, b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


MAKERS: list[Any] = [(make_zip, "x.zip"), (make_tar, "x.tar.gz")]


@pytest.mark.parametrize(("make", "name"), MAKERS)
@pytest.mark.parametrize(
    "bad", ["/etc/SKILL.md", "../SKILL.md", "a/../../SKILL.md", "C:/x/SKILL.md", "..\\x\\SKILL.md"]
)
def test_an_archive_whose_names_leave_it_is_refused_whole(
    tmp_path: Path, make: Any, name: str, bad: str
) -> None:
    path = make(tmp_path / name, {"a/SKILL.md": GOOD, bad: GOOD})
    with pytest.raises(DataError, match="is refused"):
        import_path(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [name]


@pytest.mark.parametrize(("make", "name"), MAKERS)
def test_links_in_an_archive_are_counted_and_not_followed(
    tmp_path: Path, make: Any, name: str
) -> None:
    members = {"a/SKILL.md": GOOD, "b/SKILL.md": "../../secret"}
    found = import_path(make(tmp_path / name, members, ("b/SKILL.md",)))
    assert [i.id for i in found.items] == ["a"]
    ((where, why),) = found.skipped
    assert where == "b/SKILL.md"
    assert "link" in why


@pytest.mark.parametrize(("make", "name"), MAKERS)
def test_an_exported_folder_comes_back_out_of_an_archive(
    tmp_path: Path, make: Any, name: str
) -> None:
    item = SkillItem(id="x", title="A title", principle="P.", status="active", pinned=True)
    export_folder([item], tmp_path / "out")
    members = {
        f"top/{p.relative_to(tmp_path / 'out')}": p.read_text()
        for p in (tmp_path / "out").rglob("*")
        if p.is_file()
    }
    members["top/a-title/scripts/run.sh"] = "x"
    found = import_path(make(tmp_path / name, members))
    assert found.items == (item,)
    assert "1 other files" in found.warnings[0]


def test_a_skill_at_the_top_of_an_archive_takes_the_archives_name(tmp_path: Path) -> None:
    found = import_path(make_zip(tmp_path / "a.zip", {"SKILL.md": GOOD, "refs/x.md": "x"}))
    assert [i.id for i in found.items] == ["a"]
    assert not any("must be equal" in w for w in found.warnings)


def test_members_that_unpack_to_much_are_read_no_further(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/SKILL.md", GOOD + "x" * 2**23)
        archive.writestr("b/SKILL.md", GOOD.replace("name: a", "name: b"))
    found = import_path(path)
    assert [i.id for i in found.items] == ["b"]
    assert "larger than" in found.skipped[0][1]


def test_an_archive_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skills.interop.files, "MAX_TOTAL", 2000)
    path = make_tar(tmp_path / "x.tar.gz", {"a/SKILL.md": GOOD, "a/data": "0" * 3000})
    with pytest.raises(DataError, match="more than 2000 bytes"):
        import_path(path)


@pytest.mark.parametrize("damage", [60, -30])
def test_a_damaged_archive_is_a_clear_error(tmp_path: Path, damage: int) -> None:
    path = make_tar(tmp_path / "x.tar.gz", {f"a{n}/SKILL.md": GOOD * 9 for n in range(50)})
    path.write_bytes(path.read_bytes()[:damage])
    with pytest.raises(DataError):
        import_path(path)


def test_an_encrypted_archive_is_a_clear_error(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "x.zip", {"a/SKILL.md": GOOD})
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + offset] |= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match="not a readable archive"):
        import_path(path)


def test_empty_folders_and_archives_say_what_they_should_hold(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no SKILL\.md"):
        import_path(tmp_path / "empty")
    with pytest.raises(DataError, match=r"holds no SKILL\.md"):
        import_path(make_zip(tmp_path / "x.zip", {"README.md": "x"}))
