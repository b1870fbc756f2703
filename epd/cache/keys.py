"""The key of each item, by its content or by what its client calls it."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ec_store import StoreUnavailable
from ec_store.threads import DaemonPool
from epd.bodies.cuts import NO_CUTS, Cuts
from epd.bodies.items import MODALITY, Body, MMItem
from epd.cache.encoder_cache import EncoderCache
from epd.cache.identity import content_key, name_key
from epd.cache.names import Name, Names
from epd.config import ProxyConfig
from epd.errors import BadRequest, MediaFetchFailed, UnknownMedia, no_store
from epd.media.parts import Inline, Known, check_image, check_inside, source
from epd.tenants import Scope, Tenant
from epd.transfer.encoded import EncodedItem, metadata_uuid

IN_THREAD = 2 * 1024**2
"""Characters of base64 in a request above which its media are looked into off the event loop.
Hashing so many takes less than a millisecond; a thread takes longer to come by on a busy machine.
"""


FILE_THREADS = 4
"""Threads that look where `file://` paths lead."""


class Keys:
    """Gives items their keys, and remembers for whom they have which name.

    A client may name its media by a `uuid` of its own, and later send that alone. The name is one
    input of a digest that also holds the tenant: nobody can name another's.
    """

    def __init__(self, cache: EncoderCache | None) -> None:
        self._names = None if cache is None else Names(cache)
        # Threads of their own: those that hang keep nothing else waiting.
        self._files = DaemonPool(FILE_THREADS, "files")

    async def of(
        self,
        body: Body,
        items: Sequence[MMItem],
        tenant: Tenant,
        config: ProxyConfig,
        cuts: Cuts = NO_CUTS,
    ) -> Mapping[MMItem, str | None]:
        """The key of each item; None where only the engine sees the content.

        Args:
            body: the request.
            items: its items.
            tenant: whose request it is.
            config: what a request may have, and how it is kept apart from others.
            cuts: what was cut out of it.

        Raises:
            MediaFetchFailed: the file system does not say where a file is.
            BadRequest: an item has no media, or such as a request may not have, or has them where a
                request may not name them.
            UnknownMedia: nothing is known under a client's name for its media.
            RequestRefused: 503, the store that knows the names gives no answer.
        """
        if not items:
            return {}
        named: list[MMItem] = []
        inline: dict[MMItem, Inline] = {}
        paths: dict[str, str] = {}
        for item in items:
            media = source(item, cuts)
            if isinstance(media, Inline):
                inline[item] = media
            elif isinstance(media, Known):
                named.append(item)
            elif media.path is not None:
                paths[item.media_param] = media.path
        if paths:
            await self._check_files(paths, config)
        known = await self._recalled(body, named, tenant, config) if named else {}
        scope = config.scope_of(tenant)
        if sum([len(media.base64) for media in inline.values()]) > IN_THREAD:
            keys = await asyncio.to_thread(_content_keys, scope, inline, config)
        else:
            keys = _content_keys(scope, inline, config)
        return {item: known.get(item) or keys.get(item) for item in items}

    async def _check_files(self, paths: Mapping[str, str], config: ProxyConfig) -> None:
        """Refuse files that requests may not name. The file system may hang: it has time for that.

        Args:
            paths: those of the files, by where the request names them.
            config: the request's.
        """
        folder = config.allowed_local_media_path
        if folder is None:
            raise BadRequest(
                "file:// media are off; --allowed-local-media-path turns them on",
                param=next(iter(paths)),
            )

        def check() -> None:
            for param, path in paths.items():
                check_inside(path, folder, param)

        try:
            async with asyncio.timeout(config.media_timeout_s):
                await asyncio.wrap_future(self._files.submit(check))
        except TimeoutError:
            raise MediaFetchFailed("the folder of file:// media gives no answer") from None

    async def remember(
        self, body: Body, encoded: Sequence[EncodedItem], tenant: Tenant, config: ProxyConfig
    ) -> None:
        """Let clients name what they have sent: by their uuid, or by the key they were told.

        A name whose item cannot be used by name stands for nothing from then on.
        """
        for one in encoded:
            key = metadata_uuid(one, body)
            uuid = one.item.uuid or key
            if self._names is None or uuid is None or not one.item.has_media:
                continue
            model, modality = body.get("model"), one.item.modality
            name = name_key(config.name_scope_of(tenant), modality, uuid)
            if key is None:
                with suppress(StoreUnavailable):
                    await self._names.forget(model, [name])
            else:
                stands_for = Name(key, own=one.uuid is not None)
                await self._names.remember(model, name, modality, stands_for)

    async def forget(
        self, uuid: str, model: str | None, tenant: Tenant, config: ProxyConfig
    ) -> None:
        """Forget what a tenant calls so, and entries of its own that the name stood for.

        Where tenants share entries, another may use them: they are left to expire.

        Raises:
            UnknownMedia: this tenant has no media of this name.
            RequestRefused: 503, there is no store, or it gives no answer.
        """
        if self._names is None:
            raise no_store("the proxy has no encoder-cache store: --ec-store")
        scope = config.name_scope_of(tenant)
        names = [name_key(scope, modality, uuid) for modality in {*MODALITY.values()}]
        try:
            known = await self._names.recall(model, names)
            if not known:
                raise UnknownMedia("no media are known under this uuid", param="uuid")
            alone = config.isolation == "tenant"
            own = [name.key for name in known.values() if name.own and alone]
            await self._names.forget(model, list(known), own)
        except StoreUnavailable as error:
            raise no_store("the encoder cache gives no answer") from error

    async def _recalled(
        self, body: Body, items: Sequence[MMItem], tenant: Tenant, config: ProxyConfig
    ) -> Mapping[MMItem, str]:
        scope = config.name_scope_of(tenant)
        names = {
            item: name_key(scope, item.modality, item.uuid)
            for item in items
            if item.uuid is not None
        }
        if not names:
            return {}
        found: Mapping[str, Name] = {}
        if self._names is not None:
            try:
                found = await self._names.recall(body.get("model"), list({*names.values()}))
            except StoreUnavailable as error:
                raise no_store("the encoder cache gives no answer") from error
        for item, name in names.items():
            if name not in found:
                raise UnknownMedia(
                    "no media are known under this uuid: send them once more", param=item.param
                )
        return {item: found[name].key for item, name in names.items()}


def _content_keys(
    scope: Scope, inline: Mapping[MMItem, Inline], config: ProxyConfig
) -> dict[MMItem, str]:
    """The keys of media that are in the request, once all have been found fit for an engine."""
    for item, media in inline.items():
        if item.modality == "image":
            check_image(
                media,
                min_side=config.min_image_side,
                max_pixels=config.max_image_pixels,
                param=item.param,
            )
    return {item: content_key(scope, item.modality, media) for item, media in inline.items()}
