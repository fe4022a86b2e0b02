// The worker that owns the core, seen from the page: questions with promises for answers, and events.
// src/web/protocol.rs has the words of it.

/** The event that answers each request; any of them may be answered by `failed` instead. */
const ANSWERS = {
  start: 'ready',
  open: 'model',
  calibration: 'text',
  plan: 'plan',
  quantize: 'done',
  pause: 'paused',
  resume: 'resumed',
  evaluate: 'score',
  compare: 'compared',
  last_words: 'last_words',
  generate: 'generated',
  lesson: 'lesson',
  list: 'stored',
  fetch: 'files',
  remove: 'stored',
};

/** What the worker says when it cannot: its message, the exit code, whether it can go on later, and which rule is at fault. */
export class Failure extends Error {
  constructor({ message, code, resumable, rule = null }) {
    super(message);
    this.code = code;
    this.resumable = resumable;
    this.rule = rule;
  }
}

export class Core {
  #worker;
  #waiting = new Map();
  #next = 1;

  /** `onEvent(event)` hears everything, answers too. */
  constructor(url, onEvent) {
    this.#worker = new Worker(url);
    this.#worker.onmessage = ({ data }) => {
      onEvent(data.event);
      this.#settle(data);
    };
    this.#worker.onerror = (error) => {
      error.preventDefault();
      this.#end(`the worker stopped: ${error.message || 'it could not be loaded'}. Reload the page`);
    };
  }

  /** Asks and resolves with the answer's event; `files` of the answer are put into it. `hear(event)` hears all events on the way. */
  ask(request, { files, directory, hear } = {}) {
    const id = this.#next++;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { answer: ANSWERS[request.type], resolve, reject, hear });
      this.#worker.postMessage({ id, request, files, directory });
    });
  }

  /** Says something that needs no answer. */
  tell(request) {
    this.#worker.postMessage({ id: this.#next++, request });
  }

  #settle({ id, event, files }) {
    const waiting = this.#waiting.get(id);
    if (!waiting) return;
    waiting.hear?.(event);
    if (event.type === 'failed') {
      this.#waiting.delete(id);
      waiting.reject(new Failure(event));
    } else if (event.type === waiting.answer) {
      this.#waiting.delete(id);
      waiting.resolve({ ...event, files });
    }
  }

  #end(message) {
    for (const { reject } of this.#waiting.values()) {
      reject(new Failure({ message, code: 70, resumable: true }));
    }
    this.#waiting.clear();
  }
}
