package browser

import (
	"context"
	"flag"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

var (
	pages  = flag.String("pages", "", "directory with the pages to look at")
	shots  = flag.String("shots", "", "directory that gets the screenshots")
	update = flag.Bool("update", false, "store the screenshots in place of those that are compared with")
	chrome = flag.String("chromium", "", "the browser (default: chromium or google-chrome of the path)")
)

// tab is a page in a browser without a network, and what it complained of.
type tab struct {
	context.Context
	mu     sync.Mutex
	faults []string // guarded by mu: errors of scripts, of the policy, and requests that left the file
}

// open loads a page at a width and height.
func open(t *testing.T, name string, width, height int64, more ...chromedp.Action) *tab {
	t.Helper()
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox, chromedp.Flag("force-color-profile", "srgb"),
		chromedp.Flag("font-render-hinting", "none"), chromedp.Flag("disable-lcd-text", true))
	if *chrome != "" {
		options = append(options, chromedp.ExecPath(*chrome))
	}
	alloc, cancel := chromedp.NewExecAllocator(t.Context(), options...)
	t.Cleanup(cancel)
	ctx, cancel := chromedp.NewContext(alloc)
	t.Cleanup(cancel)
	ctx, cancel = context.WithTimeout(ctx, 2*time.Minute)
	t.Cleanup(cancel)
	p := &tab{Context: ctx}
	chromedp.ListenTarget(ctx, p.listen)
	path, err := filepath.Abs(filepath.Join(*pages, name))
	if err != nil {
		t.Fatal(err)
	}
	p.do(t, network.Enable(), log.Enable(), network.OverrideNetworkState(true, 0, 0, 0), chromedp.EmulateViewport(width, height))
	p.do(t, more...)
	p.do(t, chromedp.Navigate("file://"+path), chromedp.WaitReady("html[data-drawn]"))
	return p
}

func (p *tab) listen(event any) {
	fault := ""
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		fault = e.ExceptionDetails.Error()
	case *runtime.EventConsoleAPICalled:
		if e.Type == runtime.APITypeError || e.Type == runtime.APITypeWarning {
			for _, a := range e.Args {
				fault += string(a.Value) + " "
			}
		}
	case *log.EventEntryAdded: // a breach of the policy is one
		fault = e.Entry.Text
	case *network.EventRequestWillBeSent:
		if u := e.Request.URL; !strings.HasPrefix(u, "file:") && !strings.HasPrefix(u, "data:") && !strings.HasPrefix(u, "blob:") {
			fault = "it asks for " + u
		}
	case *page.EventJavascriptDialogOpening:
		fault = "a dialog: " + e.Message
	}
	if fault != "" {
		p.mu.Lock()
		p.faults = append(p.faults, fault)
		p.mu.Unlock()
	}
}

// do runs actions.
func (p *tab) do(t *testing.T, actions ...chromedp.Action) {
	t.Helper()
	if err := chromedp.Run(p, actions...); err != nil {
		t.Fatal(err)
	}
}

// ask returns the value of an expression.
func ask[T any](t *testing.T, p *tab, expression string) T {
	t.Helper()
	var v T
	p.do(t, chromedp.Evaluate(expression, &v))
	return v
}

// clean fails for what the page complained of.
func (p *tab) clean(t *testing.T) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.faults {
		t.Errorf("the browser says: %s", f)
	}
}

// gray shows a page without color, as a printer without would.
func gray() chromedp.Action {
	return emulation.SetEmulatedVisionDeficiency(emulation.SetEmulatedVisionDeficiencyTypeAchromatopsia)
}

// empty lists the charts in which nothing is drawn: fewer than two shades.
const empty = `[...document.querySelectorAll("figure")].filter(f => f.querySelector(".draw")).flatMap(f => {
  const charts = [...f.querySelectorAll(".chart canvas")];
  if (!charts.length) return [f.id + " has no canvas"];
  return charts.filter(c => {
    const px = c.getContext("2d").getImageData(0, 0, c.width, c.height).data, seen = new Set();
    for (let i = 0; i < px.length && seen.size < 4; i += 4) if (px[i + 3] > 0) seen.add(px[i] << 16 | px[i + 1] << 8 | px[i + 2]);
    return seen.size < 4;
  }).map(() => f.id + " " + f.querySelector("h3").textContent + " is empty");
})`

// wide lists what makes the page scroll sideways.
const wide = `document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll")).slice(0, 5).map(e => e.tagName + " " + e.className + " " + e.textContent.slice(0, 40))`

func pageNames(t *testing.T) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(*pages, "*.html"))
	if err != nil || len(list) == 0 {
		t.Fatalf("no pages in -pages %q; run `make test-report`", *pages)
	}
	for i := range list {
		list[i] = filepath.Base(list[i])
	}
	return list
}

// Every figure of every page is drawn in all of its views, on a desk and on a phone, by day and by night, without a
// complaint of the browser and without a request.
func TestFiguresAreDrawn(t *testing.T) {
	for _, name := range pageNames(t) {
		for _, size := range [][2]int64{{1280, 800}, {390, 844}} {
			for _, scheme := range []string{"light", "dark"} {
				t.Run(fmt.Sprintf("%s %d %s", name, size[0], scheme), func(t *testing.T) {
					p := open(t, name, size[0], size[1], emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}))
					for view := range 6 {
						more := ask[int](t, p, fmt.Sprintf(`[...document.querySelectorAll('.bar .group[aria-label="What is shown"]')].map(g => g.children[%d]).filter(Boolean).map(b => b.click()).length`, view))
						for _, fault := range ask[[]string](t, p, empty) {
							t.Errorf("view %d: %s", view, fault)
						}
						if more == 0 {
							break
						}
					}
					if faults := ask[[]string](t, p, wide); len(faults) > 0 {
						t.Errorf("it is wider than the screen: %q", faults)
					}
					p.clean(t)
				})
			}
		}
	}
}
