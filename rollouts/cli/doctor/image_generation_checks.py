"""What the server generates about images: from the engine's pixels, from files, and from its cache."""

from __future__ import annotations

from rollouts.cli.doctor.finding import Finding, failed, ok, skipped
from rollouts.cli.doctor.image_rendering_checks import rendered_pixels
from rollouts.cli.doctor.target import Target, completion_of, fresh_image, max_logprob_difference


async def image_request(target: Target) -> Finding:
    """Two different images must give different log-probabilities."""
    first, second = target.image_prompt(fresh_image()), target.image_prompt(fresh_image())
    difference = max_logprob_difference(await target.sample(first), await target.sample(second))
    if difference > 1e-6:
        return ok(f"two images give different completions (log-probabilities differ by up to {difference:.2g})")
    return failed(
        "two different images give exactly the same completion: the server ignores images",
        'send files: VLLMEngine(media="content_parts"); features may be normalised twice',
    )


async def image_pixels(target: Target) -> Finding:
    """The engine's pixels must give the log-probabilities that the server's own processing of the same file gives."""
    if target.image_mode != "features":
        return await rendered_pixels(target)
    if not target.capabilities.content_parts:
        return skipped(f"vLLM {target.capabilities.version} takes no `content_parts` to compare with")
    rendered = target.image_prompt(fresh_image())
    difference = max_logprob_difference(
        await target.sample(rendered), await target.sample(rendered, engine=target.server_side)
    )
    if difference <= target.tolerance:
        return ok(f"log-probabilities equal those after the server's own processing (at most {difference:.2g} apart)")
    return failed(
        f"log-probabilities are up to {difference:.2g} from those after the server's own processing of the same file",
        'send files: VLLMEngine(media="content_parts")',
    )


async def image_cache(target: Target) -> Finding:
    """An image that the server has seen must be found by its hash alone."""
    rendered = target.image_prompt(fresh_image())
    first = await target.sample(rendered)
    request = target.request(rendered)
    payload = target.image_payload(request)
    response = await target.post_hashes_only(request, payload)
    if response.status != 200 and payload.is_cache_miss(response.status, response.body.decode(errors="replace")):
        return failed(
            "an image that was just sent is not found by its hash: every request has to carry the data of its images",
            "start `vllm serve` without --mm-processor-cache-gb 0, and with --api-server-count 1: each API server has "
            "a cache of its own",
        )
    difference = max_logprob_difference(first, completion_of(response, rendered, "a request with known media"))
    if difference <= target.tolerance:
        return ok(f"an image sent as its hash alone gives the same completion (at most {difference:.2g} apart)")
    return failed(
        f"the same image sent as its hash alone gives log-probabilities {difference:.2g} from those of the first time",
        "the server's cache mixes up images: stop `vllm serve` and start it again",
    )


async def unknown_image(target: Target) -> Finding:
    """A hash that the server does not know must be refused in the way on which sending the image again relies."""
    request = target.request(target.image_prompt(fresh_image()), max_tokens=1)
    payload = target.image_payload(request)
    response = await target.post_hashes_only(request, payload)
    version = target.capabilities.version
    if await target.health() != 200:
        return failed(
            "an unknown image hash has ended the server's engine",
            f"start `vllm serve` again, after pip install --upgrade vllm (this is {version})",
        )
    if response.status == 200:
        return failed(
            "the server answers a request about an image that it never received",
            f"pip install --upgrade vllm (this is {version}): its completions cannot be trusted",
        )
    if payload.is_cache_miss(response.status, response.body.decode(errors="replace")):
        return ok(f"an unknown hash is refused with {response.status}, and the server lives: images are resent")
    return failed(
        f"an unknown hash is answered with {response.status}, which does not say that the image has to be resent",
        "pip install --upgrade mmrollouts: this version of vLLM reports a cache miss in another way",
    )
