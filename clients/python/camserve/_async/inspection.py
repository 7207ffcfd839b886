"""Calls that look inside a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from camserve._async.connection import Calls
from camserve._codec.inspection import (
    basis_options,
    decode_features,
    decode_inspection,
    features_request,
    inspection_request,
    shared_options,
)
from camserve._transport import aio as transport
from camserve._transport.stream import refuse_single_image

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Unpack

    from camserve._values.inspection import Features, Inspection
    from camserve._values.options import FeaturesOptions, ImageLike, InspectOptions


class InspectionCalls(Calls):
    """Calls that look inside a model: at all of its layers, or at the channels of one."""

    async def inspect(
        self,
        image: ImageLike,
        *,
        timeout: float | None = None,
        **options: Unpack[InspectOptions],
    ) -> Inspection:
        """Measure every layer of a model on one image.

        Args:
            image: An image as for ``explain``.
            timeout: Timeout in seconds, instead of the client's.
            **options: The model, target and layers: see ``InspectOptions``.

        Raises:
            CamserveError: The subclass gives the reason.

        Example:
            >>> inspection = await client.inspect("cat.jpg", layers=["conv_stem", "bn2"])
            >>> [(layer.name, layer.output_shape, f"{layer.activation.zeros:.0%} zeros") for layer in inspection.layers]
            [('conv_stem', (1, 32, 112, 112), '0% zeros'), ('bn2', (1, 1280, 7, 7), '94% zeros')]
        """
        request = await transport.run_blocking(lambda: inspection_request(self._file_of(image), self._named(options)))
        return decode_inspection(await self._call(lambda stubs: stubs.explain.InspectLayers, request, timeout))

    async def features(
        self,
        image: ImageLike,
        *,
        timeout: float | None = None,
        **options: Unpack[FeaturesOptions],
    ) -> Features:
        """Return channels of a layer: the most active ones, or those that matter most for the score.

        With the option ``rank``, return its principal components, its concepts or the heads of an attention instead.

        Args:
            image: An image as for ``explain``.
            timeout: Timeout in seconds, instead of the client's.
            **options: The layer, and the number and order of its channels: see ``FeaturesOptions``.

        Raises:
            CamserveError: The subclass gives the reason.

        Example:
            >>> features = await client.features("cat.jpg", layer="bn2", top=3)
            >>> [channel.index for channel in features.channels], features.channel_count
            ([287, 112, 451], 1280)
            >>> features.maps.shape
            (3, 7, 7)
        """
        request = await transport.run_blocking(
            lambda: features_request(self._file_of(image), self._named(options), self._file_of)
        )
        response = await self._call(lambda stubs: stubs.explain.ExtractFeatures, request, timeout)
        return decode_features(response, options)

    async def features_many(
        self,
        images: Iterable[ImageLike],
        *,
        timeout: float | None = None,
        **options: Unpack[FeaturesOptions],
    ) -> tuple[Features, ...]:
        """Return the principal components that several photos share, so that equal colours mean equal features.

        The components are those of the features of all photos. The client sends one request to compute them, and one
        more for each photo after the first.

        Args:
            images: 1 to 16 images, each as for ``explain``.
            timeout: Seconds for each request, instead of the client's.
            **options: The layer, and the number of components: see ``FeaturesOptions``.

        Returns:
            The result of each photo; all have the same ``basis``.

        Raises:
            CamserveError: The subclass gives the reason.

        Example:
            >>> first, second = await client.features_many(["cat.jpg", "cat.jpg"], rank="pca", top=3)
            >>> first.maps.shape, (first.basis.vectors == second.basis.vectors).all()
            ((3, 7, 7), np.True_)
        """
        photos = tuple(refuse_single_image(images, "features_many", "features"))
        first_options = shared_options(photos, options)
        first = await self.features(photos[0], timeout=timeout, **first_options)
        own_options = basis_options(first, options)
        others = [await self.features(image, timeout=timeout, **own_options) for image in photos[1:]]
        return (first, *others)
