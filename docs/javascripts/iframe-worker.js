/* Browsers give no workers to pages that are opened from disk. There the search runs in a hidden frame instead, which
   looks to it like a worker; from a server nothing is changed. The theme takes this file for the shim of that name, which
   it would fetch from another host. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = () => {}
      const script = frame.contentDocument.createElement("script")
      this.ready = new Promise((resolve) => { script.onload = resolve })
      script.src = new URL(url, location.href).href
      frame.contentDocument.body.append(script)
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
