// Layout of the topology for a width in pixels. Draws nothing.

const NARROW = 720;
const CHIP = { height: 26, gap: 6, roomy: 118, compact: 62 };
const PAD = 10;
const HEAD = 32;
const ROOMY_ROWS = 4;

export function places(width, roles, stored) {
  const narrow = width < NARROW;
  const gap = narrow ? 14 : 48;
  const left = narrow ? 0 : 292;
  const top = narrow ? 132 : 56;
  const columns = columnsAt(roles, { left, top, gap, each: (width - left - gap * (roles.length - 1) - 2) / roles.length });
  const height = Math.max(...Object.values(columns).map((column) => column.need), narrow ? 0 : 96);
  for (const column of Object.values(columns)) column.box.height = height;
  const bottom = top + height;
  const clients = narrow ? { x: 1, y: 1, width: 84, height: 40 } : { x: 1, y: top + height / 2 - 22, width: 84, height: 44 };
  const proxy = narrow
    ? { x: Math.max(150, width - 190), y: 1, width: Math.min(189, width - 151), height: 78 }
    : { x: 150, y: 12, width: 112, height: bottom - 12 };
  const store = stored ? { x: left + 1, y: bottom + 48, width: width - left - 2, height: 42 } : null;
  return {
    width,
    height: stored ? bottom + 48 + 43 : bottom + 1,
    clients,
    proxy,
    proxyLines: narrow ? [20, 38, 54, 70] : [0, 22, 40, 58].map((down) => proxy.y + proxy.height / 2 - 22 + down),
    columns,
    store,
    flows: flows({ narrow, clients, proxy, columns, store, top, bottom, roles }),
  };
}

function columnsAt(roles, { left, top, gap, each }) {
  return Object.fromEntries(
    roles.map(({ role, title, letter, instances }, index) => {
      const x = left + 1 + index * (each + gap);
      const inside = each - 2 * PAD;
      const fit = (size) => Math.max(1, Math.floor((inside + CHIP.gap) / (size + CHIP.gap)));
      const compact = Math.ceil(instances.length / fit(CHIP.roomy)) > ROOMY_ROWS;
      const across = Math.min(fit(compact ? CHIP.compact : CHIP.roomy), compact ? 10 : Math.max(1, Math.ceil(instances.length / 3)));
      const wide = (inside - (across - 1) * CHIP.gap) / across;
      const chips = instances.map((_, at) => ({
        x: x + PAD + (at % across) * (wide + CHIP.gap),
        y: top + HEAD + Math.floor(at / across) * (CHIP.height + CHIP.gap),
        width: wide,
        height: CHIP.height,
      }));
      const rows = Math.ceil(instances.length / across);
      const need = HEAD + rows * (CHIP.height + CHIP.gap) + PAD - CHIP.gap;
      const named = each < 150 && title.length > 8 ? letter : title;
      return [role, { compact, chips, need, title: instances.length > 1 ? `${named} ${each < 150 ? "" : "× "}${instances.length}` : named, box: { x, y: top, width: each } }];
    }),
  );
}

function flows({ narrow, clients, proxy, columns, store, top, bottom, roles }) {
  const bus = narrow ? 100 : 30;
  const middle = clients.y + clients.height / 2;
  const trunk = proxy.x + (narrow ? proxy.width / 2 : proxy.width);
  const start = narrow ? `M${trunk} ${proxy.y + proxy.height}V${bus}` : `M${trunk} ${bus}`;
  const centres = roles.map(({ role }) => columns[role].box.x + columns[role].box.width / 2);
  const found = {
    clients: { d: `M${clients.x + clients.width} ${middle}H${proxy.x - 2}`, x: (clients.x + clients.width + proxy.x) / 2, y: middle - 8, anchor: "middle" },
  };
  for (const [index, { role }] of roles.entries()) {
    const x = centres[index];
    // Starts at the neighbour closer to the proxy: overlapping lines would hide each other's dashes.
    const next = centres[index + Math.sign(trunk - x)];
    const from = (next - trunk) * (x - next) > 0 ? `M${next} ${bus}` : start;
    found[role] = { d: `${from}H${x}V${top - 2}`, x: x + 7, y: top - 8 };
  }
  const reader = columns.prefill ?? columns.prefill_decode ?? columns.decode;
  if (columns.prefill && columns.decode) {
    const [from, to] = [columns.prefill.box, columns.decode.box];
    const y = top + from.height / 2;
    found.kv = { d: `M${from.x + from.width} ${y}H${to.x - 2}`, x: (from.x + from.width + to.x) / 2, y: y - 6, anchor: "middle", silent: narrow };
  }
  if (!store) return found;
  const under = (box, part) => box.x + box.width * part;
  const writer = columns.encode ?? reader;
  if (writer) {
    const x = under(writer.box, writer === reader ? 0.3 : 0.5);
    found.write = { d: `M${x} ${bottom}V${store.y - 2}`, x: x + 7, y: bottom + 28 };
  }
  if (reader) {
    const x = under(reader.box, writer === reader ? 0.7 : 0.5);
    found.read = { d: `M${x} ${store.y}V${bottom + 2}`, x: x + 7, y: bottom + 28 };
  }
  const into = store.y + store.height / 2;
  if (!narrow) {
    const x = proxy.x + proxy.width / 2;
    found.lookup = { d: `M${x} ${bottom}V${into}H${store.x - 2}`, x: x + 7, y: into - 7 };
  }
  return found;
}
