// Search runs in a worker, which browsers do not start for pages that are opened from a folder. There,
// a hidden frame runs the worker's script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.loaded = new Promise((resolve) => {
        this.frame.onload = () => {
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.src = url;
          script.onload = () => resolve(inside);
          inside.document.body.append(script);
        };
      });
      document.body.append(this.frame);
    }

    async postMessage(data) {
      const inside = await this.loaded;
      inside.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
