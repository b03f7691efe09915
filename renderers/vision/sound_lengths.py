"""How long a sound a processor reads to its end: many cut longer ones without an error."""

from renderers.errors import MediaError
from renderers.messages import PLURALS, Modality
from renderers.vision.batching import same_bits
from renderers.vision.hf_probing import sound
from renderers.vision.hf_runner import ProcessorRunner, Sound


class SoundLengths:
    """Checks lengths in samples against what the processor was seen to read, and looks further where it must.

    A processor reads a sound to its end if other samples at the end give other tensors. What it reads depends on the
    length alone, so noise is used.
    """

    def __init__(self, runner: ProcessorRunner) -> None:
        self._runner = runner
        self._read = 0  # every sound of this length, and every shorter one, is read to its end
        self._cut = False  # a longer one is not

    def check(self, count: int, digest: str, modality: Modality) -> None:
        """Raise `MediaError` for a sound of `count` samples whose end would be left out.

        `digest` and `modality` are those of its source, a sound or a video. Raises one of `PROCESSOR_ERRORS` where the
        processor does.
        """
        if count > self._read and not self._cut:
            self._look_beyond(count)
        if count > self._read:
            rate = self._runner.part.sampling_rate
            raise MediaError(
                f"{self._runner.name} reads the first {self._read / rate:g} s of a sound and leaves out the rest "
                f"without an error; this one has {count / rate:g} s. Split it into several {PLURALS[modality]}",
                digest=digest,
            )

    def _look_beyond(self, count: int) -> None:
        rate = self._runner.part.sampling_rate
        # Seconds: the longest end of a sound that a processor may leave out because it fills no frame.
        end = round(0.1 * rate)
        # Seconds: shorter sounds are looked at in twice their length, so that one look is enough for many.
        longer = end + (2 * count if count < 60 * rate else count * 5 // 4)
        if self._is_read(longer, end):
            self._read = longer - end
            return
        if all(self._is_read(end + more, 1) for more in (1, 58, 112, 160)):
            end = 1  # this processor uses every sample
        read, cut = self._read, longer
        while cut - read > end:
            middle = (read + cut) // 2
            if self._is_read(middle, end):
                read = middle
            else:
                cut = middle
        self._read, self._cut = read, True

    def _is_read(self, count: int, end: int) -> bool:
        """Whether the last `end` of `count` samples decide anything of what the processor returns."""
        whole = sound(count)
        other = whole.samples.copy()
        other[-end:] = -other[-end:] / 2
        one, two = self._runner.run([whole]), self._runner.run([Sound(other)])
        return one.replacements != two.replacements or any(
            not same_bits(tensor, two.tensors[name]) for name, tensor in one.tensors.items()
        )
