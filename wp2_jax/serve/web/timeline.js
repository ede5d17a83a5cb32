// The chunks that were made, in the order of making; those not on the way to the newest are dimmed.

const SIDE = 56;

export class Timeline {
  // choose(number): the player wants to go on from a chunk.
  constructor(list, choose) {
    this.list = list;
    this.choose = choose;
    this.clear();
  }

  clear() {
    this.list.replaceChildren();
    this.chunks = new Map();
    this.tip = 0;
    this.entry(0, "start");
  }

  entry(number, text) {
    const button = document.createElement("button");
    button.type = "button";
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = SIDE;
    button.append(canvas, text);
    button.addEventListener("click", () => this.choose(number));
    const item = document.createElement("li");
    item.append(button);
    this.list.append(item);
    const one = { button, canvas, parent: 0, index: -1 };
    this.chunks.set(number, one);
    return one;
  }

  add(chunk) {
    const one = this.entry(chunk.chunk, String(chunk.index + 1));
    one.parent = chunk.parent;
    one.index = chunk.index;
    one.button.title = `${chunk.actions}; ${chunk.caption}`;
    one.button.setAttribute("aria-label", `go on after chunk ${chunk.index + 1}, ${chunk.actions}`);
    if (chunk.parent !== this.tip) one.button.title += ` (after chunk ${this.chunks.get(chunk.parent)?.index + 1})`;
    this.mark(chunk.chunk);
    this.list.scrollLeft = this.list.scrollWidth;
  }

  // The chunk that is gone on after.
  mark(number) {
    this.tip = number;
    const path = new Set([0]);
    for (let at = number; at && this.chunks.has(at) && !path.has(at); at = this.chunks.get(at).parent) path.add(at);
    for (const [other, { button }] of this.chunks) {
      button.classList.toggle("off", !path.has(other));
      if (other === number) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }

  // What a chunk looks like now.
  draw(number, image) {
    this.chunks.get(number)?.canvas.getContext("2d").drawImage(image, 0, 0, SIDE, SIDE);
  }
}
