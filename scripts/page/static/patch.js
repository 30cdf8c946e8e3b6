// Applies the operations of scripts/page/delta.py to a JSON value, in place; throws where one does not fit.

export function apply(root, operations) {
  for (const [name, path, ...rest] of operations) {
    if (name === "splice") {
      const [at, count, items] = rest;
      const list = reach(root, path);
      if (!Array.isArray(list) || at + count > list.length) throw new Error("a splice does not fit");
      list.splice(at, count, ...items);
    } else {
      const holder = reach(root, path.slice(0, -1));
      const key = path.at(-1);
      if (name === "drop") delete holder[key];
      else define(holder, key, rest[0]);
    }
  }
}

function reach(value, path) {
  for (const key of path) {
    if (!Object.hasOwn(value, key)) throw new Error("a path leads nowhere");
    value = value[key];
  }
  return value;
}

// As JSON.parse does it: a key such as "__proto__" is a key like any other.
function define(holder, key, value) {
  Object.defineProperty(holder, key, { value, writable: true, enumerable: true, configurable: true });
}
