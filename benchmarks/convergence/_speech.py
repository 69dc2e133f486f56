"""Speech, made: words spelt letter by letter, each letter a sound of two formants with a falling pitch.

Made: all of it, in the manner of formant synthesis (Klatt, 1980): a letter lasts 40 to 80 ms and sounds as a harmonic
series of the voice's pitch, weighted by resonances at the letter's two formants, with noise. Real: the words, from the
names in Python's standard library. The same text never sounds the same twice: speed, pitch and noise vary.
"""

import functools
import keyword
import re
from typing import NamedTuple

import numpy as np

from ._text import source_text

RATE, FRAME, BANDS, LETTERS = 8000, 160, 40, "abcdefghijklmnopqrstuvwxyz"
FRAMES, LENGTH = 80, 12


class Speech(NamedTuple):
    """Utterances.

    Attributes:
      spectrograms: logarithms of the energy in 40 bands, every 20 ms, `[n, 80, 40]`, 0 after the end.
      frames: their lengths, int32 `[n]`.
      text: letters from 1 on, padded with 0, int32 `[n, 12]`.
    """

    spectrograms: np.ndarray
    frames: np.ndarray
    text: np.ndarray


@functools.cache
def speech(training: bool) -> Speech:
    """2,000 utterances for training, or 200 of other words for testing."""
    text = bytes(source_text()[0].astype(np.uint8)).decode("ascii").lower()
    words = sorted(set(re.findall(r"\b[a-z]{4,11}\b", text)) - set(keyword.kwlist))
    words = np.random.default_rng(0).permutation(words)
    rng = np.random.default_rng(1 if training else 2)
    chosen = words[200:2200] if training else words[:200]
    sounds = [spectrogram(speak(word, rng)) for word in chosen]
    padded = np.stack([np.pad(sound, ((0, FRAMES - len(sound)), (0, 0))) for sound in sounds])
    letters = np.array([[LETTERS.index(c) + 1 for c in word] + [0] * (LENGTH - len(word)) for word in chosen], np.int32)
    return Speech(padded.astype(np.float32), np.array([len(sound) for sound in sounds], np.int32), letters)


def speak(word: str, rng: np.random.Generator) -> np.ndarray:
    """The waveform of a word, 8 kHz."""
    pitch, parts = rng.uniform(90, 200), []
    for letter in word:
        index = LETTERS.index(letter)
        first, second = 250 + 130 * (index % 6), 1000 + 550 * (index // 6)
        time = np.arange(int(RATE * rng.uniform(0.06, 0.12))) / RATE
        harmonics = np.arange(1, int(3900 / pitch))[:, None] * pitch
        gains = sum(1 / (1 + ((harmonics - formant) / 80) ** 2) for formant in (first, second))
        tone = np.sum(gains * np.sin(2 * np.pi * harmonics * time * (1 - 0.3 * time)), axis=0)
        parts.append(tone * np.sin(np.pi * np.arange(len(time)) / len(time)))
    wave = np.concatenate(parts)
    return wave + 0.05 * rng.normal(size=len(wave))


def spectrogram(wave: np.ndarray) -> np.ndarray:
    """`[frames, 40]`: log energies of windows of 40 ms, every 20 ms, in bands of 100 Hz."""
    count = min(FRAMES, (len(wave) - 2 * FRAME) // FRAME + 1)
    windows = wave[np.arange(count)[:, None] * FRAME + np.arange(2 * FRAME)] * np.hanning(2 * FRAME)
    power = np.abs(np.fft.rfft(windows))[:, : 4 * BANDS] ** 2
    return np.log(1e-3 + power.reshape(count, BANDS, -1).sum(-1)) / 4
