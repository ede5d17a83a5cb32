// Fragmented mp4, as far as recording needs it: outer boxes, and the time at which a fragment begins.

function* boxes(data, from = 0, to = data.length) {
  const view = new DataView(data.buffer, data.byteOffset);
  for (let at = from; at < to; at += view.getUint32(at)) {
    yield { name: String.fromCharCode(...data.subarray(at + 4, at + 8)), at, end: at + view.getUint32(at) };
  }
}

function find(data, names) {
  let from = 0;
  let to = data.length;
  for (const name of names) {
    const box = [...boxes(data, from, to)].find((one) => one.name === name);
    if (!box) return null;
    [from, to] = [box.at + 8, box.end];
  }
  return from;
}

// The head of a file (boxes before the first fragment); empty where a fragment has none.
export function head(data) {
  const first = [...boxes(data)].find((box) => box.name === "moof");
  return data.slice(0, first ? first.at : data.length);
}

// Collects fragments, and makes one file of them that begins at time 0.
export class Recording {
  constructor(fileHead) {
    this.parts = [fileHead];
    this.begin = null;
  }

  add(data) {
    const fragment = data.slice(head(data).length);
    const at = find(fragment, ["moof", "traf", "tfdt"]);
    const view = new DataView(fragment.buffer);
    if (at === null || view.getUint8(at) !== 1) throw new Error("a fragment without a time of 64 bits");
    const time = view.getBigUint64(at + 4);
    this.begin ??= time;
    view.setBigUint64(at + 4, time - this.begin);
    this.parts.push(fragment);
  }

  get empty() {
    return this.parts.length === 1;
  }

  file() {
    return new Blob(this.parts, { type: "video/mp4" });
  }
}
