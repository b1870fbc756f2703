// Names of roles, states and instances.

export const ROLES = {
  encode: { letter: "E", title: "Encode" },
  prefill: { letter: "P", title: "Prefill" },
  decode: { letter: "D", title: "Decode" },
  prefill_decode: { letter: "PD", title: "Prefill and decode" },
};

export const STATES = {
  healthy: { word: "healthy", glyph: "M0-5a5 5 0 1 0 0 10a5 5 0 1 0 0-10z" },
  trial: { word: "on trial", glyph: "M0-6L6 0L0 6L-6 0z" },
  ejected: { word: "ejected", glyph: "M0-6L6 5H-6z" },
  down: { word: "down", glyph: "M-5-3L-3-5L0-2L3-5L5-3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0z" },
};

export const STAGES = ["queue", "store", "encode", "prefill", "decode", "release"];

// The roles that have instances, each with its instances and their short names: E1, E2, P1 …
export function groups(instances) {
  return Object.entries(ROLES)
    .map(([role, { letter, title }]) => ({
      role,
      letter,
      title,
      instances: instances
        .filter((one) => one.role === role)
        .map((one, index) => ({ ...one, name: `${letter}${index + 1}` })),
    }))
    .filter((group) => group.instances.length);
}

export const word = (state) => STATES[state]?.word ?? state;
