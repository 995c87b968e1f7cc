/* Browsers give no workers to pages that are opened from disk. There the search runs in a hidden frame instead, which
   looks to it like a worker; from a server nothing is changed. The theme takes this file for the shim of that name, which
   it would fetch from another host. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.ready = new Promise((resolve) => {
        this.frame.addEventListener("load", () => {
          const { contentDocument: page, contentWindow: inside } = this.frame
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          inside.importScripts = () => {}
          const script = page.createElement("script")
          script.src = new URL(url, location.href).href
          script.onload = () => resolve(inside)
          page.body.append(script)
        }, { once: true })
      })
      document.body.append(this.frame)
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
