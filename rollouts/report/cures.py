"""What to do about an error of an episode, by the name of its class."""

from __future__ import annotations

from typing import Final

_ENVIRONMENT: Final = "a method of the environment raised it; correct the environment, or catch the error in `step`"

_CURES: Final = {
    "EnvironmentFailedError": _ENVIRONMENT,
    "EnvironmentProtocolError": "return a StepResult from `step` and a list of messages from `reset`",
    "EngineFailedError": "look at the log of the engine; a run repeats such episodes as [retry] says",
    "EngineClosedError": "keep the engine open until the run has ended",
    "EngineStartError": "start the command of the server by hand and correct what it prints",
    "GenerationInterruptedError": "raise [retry] max_attempts, or pause the engine with mode keep",
    "InvalidRequestError": "correct the prompt or the sampling options that the text names",
    "MissingLogProbsError": "start the server with log-probabilities, as `rollouts doctor` says",
    "NoServerError": "start a server of the fleet, or wait until one is ready",
    "OverlongPromptError": "lower [limits] max_tokens, or start the server with a larger --max-model-len",
    "PixelMismatchError": "use the processor and the versions that sampled the episode",
    "RendererFailedError": "correct the messages that the environment returns; `rollouts render` shows their tokens",
    "ServerError": "look at the log of the server; `rollouts doctor` checks it",
    "ServerTimeoutError": "lower `concurrency`, or raise the deadline of the engine",
    "ServerUnreachableError": "start the server, and check its address with `rollouts doctor URL`",
    "MessageError": "correct the messages that the environment returns",
    "TemplateError": "correct the messages so that the chat template of the model accepts them",
    "MediaDecodeError": "replace the image or video, which cannot be decoded",
    "MediaFetchError": "check the address of the medium, and that it can be reached from here",
    "MediaLimitError": "reduce the image or video, or raise the limit of the media policy",
    "MediaPolicyError": "allow the scheme, host or directory in [renderer.media]",
    "MediaTimeoutError": "raise the time limit of the media policy, or store the media nearby",
}

_OTHER: Final = "the text of the error and the episode show the cause"


def cure_of(kind: str) -> str:
    """The cure for errors of the class `kind`."""
    return _CURES.get(kind, _OTHER)
