/** Room for work underway: a caller that finds none waits, in order. */

/** A bound on bytes. */
export class Window {
  #bytes = 0;
  readonly #maxBytes: number;
  readonly #waiting: { bytes: number; admit: () => void }[] = [];

  constructor(maxBytes: number) {
    this.#maxBytes = maxBytes;
  }

  /** Waits for room. A batch larger than the whole window passes when nothing else is underway.
   * */
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
    for (let first = this.#waiting[0]; first && this.#fits(first.bytes); first = this.#waiting[0]) {
      this.#waiting.shift();
      this.#take(first.bytes);
      first.admit();
    }
  }

  #fits(bytes: number): boolean {
    return this.#bytes === 0 || this.#bytes + bytes <= this.#maxBytes;
  }

  #take(bytes: number): void {
    this.#bytes += bytes;
  }
}
