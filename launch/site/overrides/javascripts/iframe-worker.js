// Search without a server. Browsers start no worker for a page that was opened as a file, so the script of the worker
// runs in a hidden frame there. The offline plugin of the theme looks for the name of this file.
if (location.protocol === 'file:') {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement('iframe');
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      addEventListener('message', event => {
        if (event.source === inner) this.dispatchEvent(new MessageEvent('message', {data: event.data}));
      });
      inner.document.open();
      inner.document.write(`<script>postMessage = data => parent.postMessage(data, '*')</script>
        <script src="${url}"></script>`);
      inner.document.close();
      const loaded = new Promise(resolve => { inner.onload = resolve; });
      this.postMessage = data => loaded.then(() => inner.dispatchEvent(new MessageEvent('message', {data})));
    }
  };
}
