"""Calls that look inside a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from camserve import _codec, _inspection_codec
from camserve import _transport_async as transport
from camserve._async.connection import Calls

if TYPE_CHECKING:
    from typing import Unpack

    from camserve._inspection import Features, Inspection


class InspectionCalls(Calls):
    """Calls that look inside a model: at all of its layers, or at the channels of one."""

    async def inspect(
        self,
        image: _codec.ImageLike,
        *,
        timeout: float | None = None,
        **options: Unpack[_inspection_codec.InspectOptions],
    ) -> Inspection:
        """Measure every layer of a model on one image.

        Args:
            image: An image as for ``explain``.
            timeout: Seconds, instead of the client's.
            **options: The model, target and layers: see ``InspectOptions``.

        Raises:
            CamserveError: The subclass gives the reason.
        """
        request = await transport.run_blocking(
            lambda: _inspection_codec.inspection_request(self._file_of(image), options)
        )
        return _inspection_codec.inspection(
            await self._call(lambda stubs: stubs.explain.InspectLayers, request, timeout)
        )

    async def features(
        self,
        image: _codec.ImageLike,
        *,
        timeout: float | None = None,
        **options: Unpack[_inspection_codec.FeaturesOptions],
    ) -> Features:
        """Return channels of a layer: the most active ones, or those that matter most for the score.

        Args:
            image: An image as for ``explain``.
            timeout: Seconds, instead of the client's.
            **options: The layer, and the number and order of its channels: see ``FeaturesOptions``.

        Raises:
            CamserveError: The subclass gives the reason.
        """
        request = await transport.run_blocking(
            lambda: _inspection_codec.features_request(self._file_of(image), options)
        )
        return _inspection_codec.features(
            await self._call(lambda stubs: stubs.explain.ExtractFeatures, request, timeout)
        )
