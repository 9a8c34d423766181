// Browsers start no worker from a page that was opened from a folder. The search's runs in a hidden frame there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const tell = (target, data) => target.dispatchEvent(new MessageEvent("message", { data }));
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => tell(this, data); // what the worker says goes out, not back to itself
      const script = inside.document.createElement("script");
      const ready = new Promise((resolve) => (script.onload = resolve));
      script.src = url;
      inside.document.body.append(script);
      this.postMessage = (data) => ready.then(() => tell(inside, data));
    }
  };
}
