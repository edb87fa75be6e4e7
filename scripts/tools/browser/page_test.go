package browser

import (
	"context"
	"encoding/csv"
	"encoding/xml"
	"flag"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

var (
	pages  = flag.String("pages", "", "directory with the pages to look at")
	shots  = flag.String("shots", "", "directory that gets the screenshots")
	update = flag.Bool("update", false, "store the screenshots in place of those that are compared with")
	chrome = flag.String("chromium", "", "the browser (default: that of the path)")
)

// A tab is a page in a browser, with the faults that the browser reported.
type tab struct {
	context.Context
	mu     sync.Mutex
	faults []string // guarded by mu: errors of scripts, breaches of the policy, and requests
}

// media is the way a page is shown: "screen" or "print", "light" or "dark", in color or gray.
type media struct {
	kind, scheme string
	gray         bool
}

// open loads a page at a width and height.
func open(t *testing.T, name string, width, height int64, as media) *tab {
	t.Helper()
	options := append(
		chromedp.DefaultExecAllocatorOptions[:],
		chromedp.NoSandbox,
		chromedp.Flag("force-color-profile", "srgb"),
		chromedp.Flag("font-render-hinting", "none"),
		chromedp.Flag("disable-lcd-text", true),
		chromedp.Flag("hide-scrollbars", true),
	)
	if *chrome != "" {
		options = append(options, chromedp.ExecPath(*chrome))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	p := &tab{Context: ctx}
	if err := chromedp.Listen(ctx, p.listen); err != nil {
		t.Fatal(err)
	}
	call(t, p, network.Enable, network.EnableParams{})
	call(t, p, log.Enable, cdp.Empty{})
	call(t, p, runtime.Enable, cdp.Empty{})
	call(t, p, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Media:    as.kind,
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: as.scheme}},
	})
	if as.gray {
		call(t, p, emulation.SetEmulatedVisionDeficiency, emulation.SetEmulatedVisionDeficiencyParams{
			Type: emulation.SetEmulatedVisionDeficiencyTypeAchromatopsia,
		})
	}
	path, err := filepath.Abs(filepath.Join(*pages, name))
	if err != nil {
		t.Fatal(err)
	}
	p.do(
		t,
		chromedp.EmulateViewport(width, height),
		chromedp.Navigate("file://"+path),
		chromedp.WaitReady(chromedp.CSS("html[data-drawn]")),
	)
	return p
}

func (p *tab) listen(event any) {
	fault := ""
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		fault = fmt.Sprint(e.ExceptionDetails.Text, " ", e.ExceptionDetails.Exception)
	case *runtime.EventConsoleAPICalled:
		if e.Type == "error" || e.Type == "warning" {
			for _, a := range e.Args {
				fault += string(a.Value) + " "
			}
		}
	case *log.EventEntryAdded: // a breach of the policy is one
		fault = e.Entry.Text
	case *network.EventRequestWillBeSent:
		u := e.Request.URL
		if !strings.HasPrefix(u, "file:") && !strings.HasPrefix(u, "data:") && !strings.HasPrefix(u, "blob:") {
			fault = "it requests " + u
		}
	}
	if fault != "" {
		p.mu.Lock()
		p.faults = append(p.faults, fault)
		p.mu.Unlock()
	}
}

// do runs actions.
func (p *tab) do(t *testing.T, actions ...chromedp.Action[chromedp.Void]) {
	t.Helper()
	if err := chromedp.Do(p, actions...); err != nil {
		t.Fatal(err)
	}
}

// call runs a command of the DevTools protocol.
func call[P, R any](t *testing.T, p *tab, cmd cdp.Command[P, R], params P) {
	t.Helper()
	if _, err := chromedp.Call(p, cmd, params); err != nil {
		t.Fatal(err)
	}
}

// ask returns the value of a JavaScript expression.
func ask[T any](t *testing.T, p *tab, expression string) T {
	t.Helper()
	v, err := chromedp.Run(p, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		t.Fatalf("%.60s: %v", expression, err)
	}
	return v
}

// clean fails the test for each fault.
func (p *tab) clean(t *testing.T) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.faults {
		t.Errorf("the browser reports: %s", f)
	}
}

// empty lists the empty charts: canvases with fewer than four colors.
const empty = `[...document.querySelectorAll("figure")].filter(f => f.querySelector(".draw")).flatMap(f => {
  const charts = [...f.querySelectorAll(".chart")];
  if (!charts.length) return [f.id + " has no chart"];
  return charts.filter(chart => {
    const layers = [...chart.querySelectorAll("canvas")], c = layers[0];
    if (!c) return true;
    const copy = Object.assign(document.createElement("canvas"), {width: c.width, height: c.height})
      .getContext("2d", {willReadFrequently: true});
    for (const layer of layers) copy.drawImage(layer, 0, 0);
    const px = copy.getImageData(0, 0, c.width, c.height).data, seen = new Set();
    for (let i = 0; i < px.length && seen.size < 4; i += 4)
      if (px[i + 3] > 0) seen.add(px[i] << 16 | px[i + 1] << 8 | px[i + 2]);
    return seen.size < 4;
  }).map(() => f.id + " " + f.querySelector("h3").textContent + " is empty");
})`

// wide lists elements that make the page scroll sideways.
const wide = `document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll("body *")]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll")).slice(0, 5)
  .map(e => e.tagName + " " + e.className + " " + e.textContent.slice(0, 40))`

// saved presses every CSV and SVG button, and returns the files.
const saved = `(async () => {
  const files = [], all = [];
  URL.createObjectURL = b => { files.push(b); return "blob:kept"; };
  HTMLAnchorElement.prototype.click = () => {};
  for (const b of document.querySelectorAll(".fill button")) {
    files.length = 0;
    b.click();
    all.push({ Kind: b.textContent, Figure: b.closest("figure").querySelector("h3").textContent,
      Texts: await Promise.all(files.map(f => f.text())) });
  }
  return all;
})()`

// A savedFile holds the files that a button of a figure saves.
type savedFile struct {
	Kind, Figure string
	Texts        []string
}

// check fails the test for a file that is no CSV or SVG.
func (g savedFile) check(t *testing.T) {
	t.Helper()
	if len(g.Texts) == 0 {
		t.Errorf("%s of %s saves nothing", g.Kind, g.Figure)
	}
	for _, text := range g.Texts {
		var root struct{ XMLName xml.Name }
		if g.Kind == "CSV" {
			if rows, err := csv.NewReader(strings.NewReader(text)).ReadAll(); err != nil || len(rows) < 2 {
				t.Errorf("CSV of %s: %d rows, %v", g.Figure, len(rows), err)
			}
			continue
		}
		if err := xml.Unmarshal([]byte(text), &root); err != nil || root.XMLName.Local != "svg" {
			t.Errorf("SVG of %s: %v: %.200s", g.Figure, err, text)
		}
		if i := strings.Index(text, "NaN"); i >= 0 {
			t.Errorf("SVG of %s: %.200s", g.Figure, text[max(0, i-100):])
		}
	}
}

// nth shows the n-th view of every figure, and returns the number of figures that have one.
const nth = `[...document.querySelectorAll('.bar .group[aria-label="What is shown"]')]
  .map(g => g.children[%d]).filter(Boolean).map(b => b.click()).length`

func pageNames(t *testing.T) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(*pages, "*.html"))
	if err != nil || len(list) == 0 {
		t.Fatalf("no pages in -pages %q; run make test-report", *pages)
	}
	for i := range list {
		list[i] = filepath.Base(list[i])
	}
	return list
}

// Every figure of every page is drawn in all of its views, on a desk and on a phone, in light and dark mode, without
// faults and without requests.
func TestFiguresAreDrawn(t *testing.T) {
	for _, name := range pageNames(t) {
		for _, c := range []struct {
			width, height int64
			as            media
		}{
			{1280, 800, media{kind: "screen", scheme: "light"}}, {390, 844, media{kind: "screen", scheme: "light"}},
			{1280, 800, media{kind: "screen", scheme: "dark"}},
			{720, 1000, media{kind: "print", scheme: "dark", gray: true}},
		} {
			t.Run(fmt.Sprint(name, " ", c.width, " ", c.as.kind, " ", c.as.scheme), func(t *testing.T) {
				p := open(t, name, c.width, c.height, c.as)
				views := 1
				for view := 0; ; view++ {
					for _, fault := range ask[[]string](t, p, empty) {
						t.Errorf("view %d: %s", view, fault)
					}
					if ask[int](t, p, fmt.Sprintf(nth, view+1)) == 0 {
						break
					}
					views++
				}
				if views < 3 {
					t.Errorf("figures have at most %d views", views)
				}
				for _, b := range []string{"steps", "hours", "smooth", "zoom in"} {
					ask[int](t, p, fmt.Sprintf(`[...document.querySelectorAll(".bar button")].filter(b => `+
						`b.textContent === %q).map(b => b.click()).length`, b))
				}
				for _, fault := range ask[[]string](t, p, empty) {
					t.Errorf("with all buttons pressed: %s", fault)
				}
				if faults := ask[[]string](t, p, wide); len(faults) > 0 && c.as.kind == "screen" {
					t.Errorf("it is wider than the screen: %q", faults)
				}
				p.clean(t)
			})
		}
	}
}

// The tables of the summary fit the page, on a desk and on a phone.
func TestSummaryFits(t *testing.T) {
	for _, name := range pageNames(t) {
		for _, width := range []int64{1400, 400} {
			t.Run(fmt.Sprint(name, " ", width), func(t *testing.T) {
				p := open(t, name, width, 900, media{kind: "screen", scheme: "light"})
				if n := ask[int](t, p, `document.querySelectorAll("#summary td").length`); n == 0 &&
					name != "hostile.html" {
					t.Error("the summary is empty")
				}
				for _, wider := range ask[[]string](t, p, `[...document.querySelectorAll("#summary .scroll")]
					.filter(e => e.scrollWidth > e.clientWidth)
					.map(e => e.textContent.slice(0, 40) + ": " + e.scrollWidth + " of " + e.clientWidth)`) {
					t.Errorf("wider than the page: %q", wider)
				}
				p.clean(t)
			})
		}
	}
}

// By keyboard a reader reaches every chart and button, reads its points, and opens its numbers.
func TestKeyboard(t *testing.T) {
	const at = `(() => {
		const e = document.activeElement;
		return e === document.body ? "" : (e.closest("figure") || {id: ""}).id + " " + e.tagName + "." + e.className +
			" " + (e.getAttribute("aria-label") || e.textContent).slice(0, 40);
	})()`
	for _, name := range pageNames(t) {
		t.Run(name, func(t *testing.T) {
			p := open(t, name, 1280, 800, media{kind: "screen", scheme: "light"})
			p.do(t, chromedp.KeyEvent("\t"))
			if first := ask[string](t, p, at); !strings.Contains(first, "Skip to the figures") {
				t.Errorf("Tab goes to %q first", first)
			}
			p.do(t, chromedp.KeyEvent("\r"))
			if !ask[bool](t, p, `location.hash === "#main"`) {
				t.Error("the skip link leads nowhere")
			}
			want := ask[int](t, p, `document.querySelectorAll("main a[href], main button, main [tabindex='0'], `+
				`main summary").length`)
			reached := map[string]bool{}
			for range want + 5 {
				p.do(t, chromedp.KeyEvent("\t"))
				here := ask[string](t, p, at+` + [...document.querySelectorAll("*")].indexOf(document.activeElement)`)
				if reached[here] {
					break
				}
				reached[here] = true
			}
			if len(reached) < want {
				t.Errorf("Tab reaches %d of %d links, buttons, charts and tables", len(reached), want)
			}
			if n := ask[int](t, p, `[...document.querySelectorAll("main button, .chart, figure, .scroll")].filter(e =>
				!(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.textContent.trim())
				).length`); n > 0 {
				t.Errorf("%d buttons, charts, tables or figures have no name", n)
			}
			for i := range ask[int](t, p, `document.querySelectorAll(".chart").length`) {
				ask[bool](t, p, fmt.Sprintf(`(document.querySelectorAll(".chart")[%d].focus(), `+
					`document.getElementById("live").textContent = "", true)`, i))
				p.do(t, chromedp.KeyEvent("\u0303")) // ArrowRight
				if text := ask[string](t, p, `document.getElementById("live").textContent`); text == "" {
					t.Errorf("chart %d, %s: the arrow key reads nothing", i, ask[string](t, p, at))
				}
			}
			rows := ask[[]int](t, p, `[...document.querySelectorAll("details.numbers")].map(d => { d.open = true; `+
				`d.dispatchEvent(new Event("toggle")); return d.querySelectorAll("tbody tr").length; })`)
			for i, n := range rows {
				if n == 0 {
					t.Errorf("the %d. figure has no numbers", i+1)
				}
			}
			for _, g := range ask[[]savedFile](t, p, saved) {
				g.check(t)
			}
			p.clean(t)
		})
	}
}
