"""The key of each item, derived from its content or from the client's name for it.

The encoder store has the clients' names, with the key behind each (`epd.encoder_cache.names`).
"""

import asyncio
from collections.abc import Mapping, Sequence

from ec_store.concurrency import DaemonPool
from epd.api.body import NO_CUTS, Cuts
from epd.api.items import MODALITY, Body, MMItem
from epd.config.sections import ConfigFields
from epd.encoder_cache.client import EncoderCache
from epd.encoder_cache.identity import content_key, name_key
from epd.encoder_cache.names import ClientNames, Name
from epd.errors import BadRequest, MediaFetchFailed, UnknownMedia, no_store
from epd.media.parts import Inline, Known, check_image, check_inside, source
from epd.tenants import Scope, Tenant
from epd.transfer.encoded import METADATA_ONLY, EncodedItem, metadata_uuid

IN_THREAD = 4 * 1024**2
"""Base64 characters in a request above which its media are hashed on a thread. Hashing this many
takes less than a millisecond; on a busy machine a thread takes longer to start."""

FILE_THREADS = 4
"""Number of threads that resolve `file://` paths."""


class Keys:
    """Gives items their keys, and remembers the keys behind clients' names.

    A client may name its media by a `uuid`, and later send the uuid alone. The name's key is a
    digest that includes the tenant, so no client can use a name of another tenant.
    """

    def __init__(self, cache: EncoderCache | None) -> None:
        self._names = None if cache is None else ClientNames(cache)
        # A pool of its own: a hanging file system must not block other work.
        self._files = DaemonPool(FILE_THREADS, "files")

    async def keyed_items(
        self,
        body: Body,
        items: Sequence[MMItem],
        tenant: Tenant,
        config: ConfigFields,
        cuts: Cuts = NO_CUTS,
    ) -> tuple[MMItem, ...]:
        """Return the items with their keys, and with the sizes of pictures in the request.

        Raises:
            MediaFetchFailed: the file system did not answer.
            BadRequest: an item has no media, or media that are not allowed.
            UnknownMedia: a client's name is unknown.
            RequestRefused: 503, the store with the names did not answer.
        """
        uuids: dict[MMItem, str] = {}
        inline: dict[MMItem, Inline] = {}
        paths: dict[str, str] = {}
        for item in items:
            media = source(item, cuts)
            if isinstance(media, Inline):
                inline[item] = media
            elif isinstance(media, Known):
                uuids[item] = media.uuid
            elif media.path is not None:
                paths[item.media_param] = media.path
        if paths:
            await self._check_files(paths, config)
        with_keys = await self._named_items(body, uuids, tenant, config) if uuids else {}
        scope = config.scope_of(tenant)
        if sum([len(media.base64) for media in inline.values()]) > IN_THREAD:
            with_keys |= await asyncio.to_thread(_content_keys, scope, inline, config)
        else:
            with_keys |= _content_keys(scope, inline, config)
        return tuple([with_keys.get(item, item) for item in items])

    async def _check_files(self, paths: Mapping[str, str], config: ConfigFields) -> None:
        """Reject files outside the allowed folder, within a time limit: a file system may hang."""
        folder = config.allowed_local_media_path
        if folder is None:
            raise BadRequest(
                "file:// media are disabled; --allowed-local-media-path enables them",
                param=next(iter(paths)),
            )

        def check() -> None:
            for param, path in paths.items():
                check_inside(path, folder, param)

        try:
            async with asyncio.timeout(config.media_timeout_s):
                await asyncio.wrap_future(self._files.submit(check))
        except TimeoutError:
            raise MediaFetchFailed("the file system of the file:// media did not answer") from None

    async def remember_names(
        self, body: Body, encoded_items: Sequence[EncodedItem], tenant: Tenant, config: ConfigFields
    ) -> None:
        """Let clients name their media by the uuid that they sent or the key in the answer.

        A name of other media is forgotten if its new item cannot be referenced by name.
        """
        for encoded_item in encoded_items:
            key = metadata_uuid(encoded_item, body)
            if encoded_item.result == "local" and encoded_item.item.modality in METADATA_ONLY:
                # Its consumer may write the entry. Until then, the name alone is refused.
                key = encoded_item.item.engine_name
            uuid = encoded_item.item.uuid or key
            if self._names is None or uuid is None or not encoded_item.item.has_media:
                continue
            model, modality = body.get("model"), encoded_item.item.modality
            name = name_key(config.name_scope_of(tenant), modality, uuid)
            if key is None:
                await self._names.drop_name(model, name, unless=encoded_item.item.content_key)
            else:
                stands_for = Name(key, own=encoded_item.item.engine_name is not None)
                await self._names.store_name(model, name, modality, stands_for)

    async def forget_uuid(
        self, uuid: str, model: str | None, tenant: Tenant, config: ConfigFields
    ) -> None:
        """Forget a tenant's name, and delete the entries behind it that only this tenant uses.

        If tenants share entries, other tenants may use them: the entries remain until they are
        evicted.

        Raises:
            UnknownMedia: the name is unknown for this tenant.
            RequestRefused: 503, there is no store, or it did not answer.
        """
        if self._names is None:
            raise no_store("the proxy has no encoder store; set --ec-store")
        scope = config.name_scope_of(tenant)
        names = [name_key(scope, modality, uuid) for modality in {*MODALITY.values()}]
        meanings = await self._names.recall_names(model, names)
        if not meanings:
            raise UnknownMedia("no media are stored under this uuid", param="uuid")
        alone = config.isolation == "tenant"
        identifiers = [name.key for name in meanings.values() if name.own and alone]
        await self._names.delete_names(model, list(meanings), identifiers)

    async def _named_items(
        self, body: Body, uuids: Mapping[MMItem, str], tenant: Tenant, config: ConfigFields
    ) -> dict[MMItem, MMItem]:
        scope = config.name_scope_of(tenant)
        names = {item: name_key(scope, item.modality, uuid) for item, uuid in uuids.items()}
        meanings: Mapping[str, Name] = {}
        if self._names is not None:
            meanings = await self._names.recall_names(body.get("model"), list({*names.values()}))
        for item, name in names.items():
            if name not in meanings:
                raise UnknownMedia(
                    "no media are stored under this uuid; send them again", param=item.param_path
                )
        return {item: item.with_key(meanings[name].key) for item, name in names.items()}


def _content_keys(
    scope: Scope, inline: Mapping[MMItem, Inline], config: ConfigFields
) -> dict[MMItem, MMItem]:
    """Return the items with keys of their media, after checking that an engine can process them.

    A picture that comes several times is checked once.
    """
    with_keys: dict[MMItem, MMItem] = {}
    pixels: dict[str, int] = {}
    for item, media in inline.items():
        key = content_key(scope, item.modality, media)
        if item.modality == "image" and key not in pixels:
            try:
                pixels[key] = check_image(media, max_pixels=config.max_image_pixels)
            except BadRequest as error:
                raise error.at_param(item.param_path) from None
        with_keys[item] = item.with_key(key, pixels.get(key, 0))
    return with_keys
