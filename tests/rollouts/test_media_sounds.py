"""`rollouts media` on sounds: their duration, rate and channels, waveforms, checks and exported files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from media_stores import lines, run, store_of
from PIL import Image
from sounds import sound_file

from renderers import MediaPolicy, MediaSource
from renderers.media.samples import samples_source
from rollouts.cli.contact_sheet import contact_sheet
from rollouts.cli.media_inventory import open_inventory

RATE = 8000
# A second of silence, then a second of a tone.
SAMPLES = (np.sin(np.arange(2 * RATE) / 3) * (np.arange(2 * RATE) >= RATE)).astype(np.float32)
ARRAY = bytes(samples_source(np.stack([SAMPLES, SAMPLES], 1), RATE, MediaPolicy()).data)


BY_LISTING = {
    "raw audio 2 s, 8000 Hz, 2 channels": ARRAY,
    "wav audio 2 s, 8000 Hz": sound_file(SAMPLES, RATE, "WAV"),
    "flac audio 2 s, 8000 Hz": sound_file(SAMPLES, RATE, "FLAC"),
    "mp3 audio 2 s, 8000 Hz": sound_file(SAMPLES, RATE, "MP3"),
    "ogg audio 2 s, 8000 Hz": sound_file(SAMPLES, RATE, "OGG"),
    "wav audio -": b"RIFF\0\0\0\0WAVE",
}


def test_sounds_are_listed_with_seconds_rate_and_channels(tmp_path: Path) -> None:
    digests = store_of(tmp_path, *BY_LISTING.values())
    expected = [f"{d[:16]} {what} {len(data):,}" for d, (what, data) in zip(digests, BY_LISTING.items(), strict=True)]
    assert lines(run("ls", tmp_path, COLUMNS="120"))[1:-1] == sorted(expected)


def test_json_has_the_properties_of_a_sound(tmp_path: Path) -> None:
    store_of(tmp_path, ARRAY)
    (listed,) = json.loads(run("ls", tmp_path, "--json").stdout)
    named = {"type": "raw", "modality": "audio", "seconds": 2.0, "rate": RATE, "channels": 2, "width": None}
    assert named.items() <= listed.items()


@pytest.mark.parametrize("data", [ARRAY, sound_file(SAMPLES, RATE, "FLAC")])
def test_a_waveform_shows_where_the_sound_is_silent(data: bytes, tmp_path: Path) -> None:
    store_of(tmp_path, data)
    assert run("ls", tmp_path, "--waveforms", COLUMNS="120").stdout.splitlines()[1].endswith(" " * 12 + "█" * 12)


def test_a_contact_sheet_draws_the_waveform(tmp_path: Path) -> None:
    store_of(tmp_path, ARRAY)
    with open_inventory(tmp_path) as inventory:
        sheet = np.asarray(contact_sheet(inventory, "title").convert("L"))
    tile = sheet[34 + 36 : 34 + 108, 10 : 10 + 144] < 64
    assert tile[:, :70].sum(0).max() == 1  # silence is a line
    assert tile[:, 74:].sum(0).min() > 60


def test_sounds_are_verified_by_decoding_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flac = sound_file(SAMPLES, RATE, "FLAC")
    digests = store_of(tmp_path, ARRAY, flac, flac[: len(flac) // 2])
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert lines(result)[0].startswith(f"{digests[2]}: undecodable: sound {digests[2][:12]} is corrupt")
    assert lines(result)[1] == "1 failed, 3 media checked"
    monkeypatch.setitem(sys.modules, "soundfile", None)
    without = run("verify", tmp_path)
    assert without.exit_code == 0
    assert lines(without)[0].count("not decoded: soundfile is not installed") == 1


def test_samples_are_exported_as_a_wav_and_files_as_they_are(tmp_path: Path) -> None:
    array, flac = store_of(tmp_path / "store", ARRAY, sound_file(SAMPLES, RATE, "FLAC"))
    assert run("export", tmp_path / "store", "--out", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / f"{flac[:16]}.flac").read_bytes() == sound_file(SAMPLES, RATE, "FLAC")
    samples, rate = soundfile.read(tmp_path / "out" / f"{array[:16]}.wav", dtype="float32")
    assert rate == RATE
    assert np.array_equal(samples, np.stack([SAMPLES, SAMPLES], 1))
    assert MediaSource.of(ARRAY).digest == array
    with pytest.raises(OSError, match="cannot identify"):
        Image.open(tmp_path / "out" / f"{array[:16]}.wav")
