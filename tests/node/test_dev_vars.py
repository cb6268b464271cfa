"""`.dev.vars` and `.env` files as wrangler reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.errors import ConfigError
from edge.node.dev_vars import load_dev_vars


def load(folder: Path, files: dict[str, str], environment: str = "", **process_env: str) -> dict[str, str]:
    for name, text in files.items():
        (folder / name).write_text(text, newline="")
    return load_dev_vars(folder / "wrangler.toml", environment, process_env=process_env)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1", {"A": "1"}),
        ("\ufeffA=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
        ("# comment\n\n  A = two words  # comment\n", {"A": "two words"}),
        ("export A=1\nB: 2\n", {"A": "1", "B": "2"}),
        ("A=\nB=''\n", {"A": "", "B": ""}),
        ("A=\"x # y\" # z\nB='#'\n", {"A": "x # y", "B": "#"}),
        ("A=\"one\\ntwo\"\nB='one\\ntwo'\n", {"A": "one\ntwo", "B": "one\\ntwo"}),
        ('KEY="-----BEGIN\nabc=\n-----END"\nB=1', {"KEY": "-----BEGIN\nabc=\n-----END", "B": "1"}),
        ('A=`it\'s "it"`\n', {"A": 'it\'s "it"'}),
        ("A=a=b==\n", {"A": "a=b=="}),
        ("A=1\nA=2\n", {"A": "2"}),
        ('A={"json": true}\n', {"A": '{"json": true}'}),
        ("A=$B\nB=1\n", {"A": "$B", "B": "1"}),
    ],
)
def test_what_a_line_means(tmp_path, text, expected):
    assert load(tmp_path, {".dev.vars": text}) == expected


@pytest.mark.parametrize("text", ["A=1\nnonsense\n", "A=1\n=2\n"])
def test_lines_that_are_none(tmp_path, text):
    with pytest.raises(ConfigError, match=r"\.dev\.vars, line 2: expected NAME=value"):
        load(tmp_path, {".dev.vars": text})


def test_env_files_may_have_other_lines(tmp_path):
    assert load(tmp_path, {".env": "set -e\nA=1\nsource x"}) == {"A": "1"}


def test_files_of_an_environment_replace_the_others(tmp_path):
    files = {".dev.vars": "A=1\nB=1", ".dev.vars.staging": "A=2", ".env": "C=3"}
    assert load(tmp_path, files) == {"A": "1", "B": "1"}
    assert load(tmp_path, {}, "staging") == {"A": "2"}
    assert load(tmp_path, {}, "other") == {"A": "1", "B": "1"}


def test_env_files_are_merged(tmp_path):
    files = {".env": "A=1\nB=1\nC=1\nD=1", ".env.local": "B=2", ".env.prod": "C=3", ".env.prod.local": "D=4"}
    assert load(tmp_path, files) == {"A": "1", "B": "2", "C": "1", "D": "1"}
    assert load(tmp_path, {}, "prod") == {"A": "1", "B": "2", "C": "3", "D": "4"}
    assert load(tmp_path, {}, CLOUDFLARE_LOAD_DEV_VARS_FROM_DOT_ENV="false") == {}


def test_variables_in_env_files(tmp_path):
    text = (
        "HOST=db\nURL=http://$HOST:${PORT:-5432}/${NONE}\nDEEP=${URL}!\nPRICE=\\$5\n"
        "LOOP=a$LOOP2\nLOOP2=b$LOOP\nHOME2=${HOME_OF_PROCESS}\n"
    )
    assert load(tmp_path, {".env": text}, HOME_OF_PROCESS="/home") == {
        "HOST": "db",
        "URL": "http://db:5432/",
        "DEEP": "http://db:5432/!",
        "PRICE": "$5",
        "LOOP": "ab",
        "LOOP2": "ba",
        "HOME2": "/home",
    }


def test_the_process_can_be_included(tmp_path):
    found = load(tmp_path, {".env": "A=1"}, CLOUDFLARE_INCLUDE_PROCESS_ENV="true", A="0", B="2")
    assert (found["A"], found["B"]) == ("1", "2")


def test_no_files(tmp_path):
    assert load(tmp_path, {}) == {}
