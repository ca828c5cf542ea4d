/** Room for what is underway: whoever finds none waits, in order. */

/** A bound on bytes, and on how many things they are in. */
export class Window {
  #bytes = 0;
  #count = 0;
  readonly #maxBytes: number;
  readonly #maxCount: number;
  readonly #waiting: { bytes: number; admit: () => void }[] = [];

  constructor(maxBytes: number, maxCount: number) {
    this.#maxBytes = maxBytes;
    this.#maxCount = maxCount;
  }

  /** Waits for room. What is larger than the whole window passes when nothing else is underway. */
  async enter(bytes: number): Promise<void> {
    if (this.#waiting.length > 0 || !this.#fits(bytes)) {
      await new Promise<void>((admit) => this.#waiting.push({ bytes, admit }));
    } else {
      this.#take(bytes);
    }
  }

  /** Gives room back. */
  leave(bytes: number): void {
    this.#bytes -= bytes;
    this.#count--;
    for (let first = this.#waiting[0]; first && this.#fits(first.bytes); first = this.#waiting[0]) {
      this.#waiting.shift();
      this.#take(first.bytes);
      first.admit();
    }
  }

  #fits(bytes: number): boolean {
    return this.#count === 0 || (this.#count < this.#maxCount && this.#bytes + bytes <= this.#maxBytes);
  }

  #take(bytes: number): void {
    this.#bytes += bytes;
    this.#count++;
  }
}
