// Package report draws runs and experiments: one HTML page that asks nothing of any network, at most
// MaxPage bytes long. The figures are data (payload.go) that Apache ECharts draws in the browser. What a
// page is made of, errors and names too, may come from anybody: it reaches the page as escaped text or JSON only.
package report

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"strings"

	"github.com/cprun/cprun/internal/lab/experiment"
	"github.com/cprun/cprun/internal/model/metrics"
)

// MaxPage is the longest page, in bytes.
const MaxPage = 5_000_000

// Input is the content of a page.
type Input struct {
	Title   string
	Command string // that made the results, as a shell reads it; "" if each run has its own
	Commit  string // the program's version
	Machine string // for a reader

	Experiment *experiment.Results // nil: none
	// Plans are the plan.json of the experiment's cells, by cell; without one a cell is not in the roofline.
	Plans map[string]*Plan
	Runs  []Run
}

// A Run is the content of a run directory.
type Run struct {
	Name    string // that tells it from the others of the page
	Command string // the last that started or continued it; "" if the log is gone
	Commit  string
	Machine string
	Ended   string // the end in the log; "" for a run that goes on, or was killed

	Steps   []metrics.Step  // ascending, thinned if the file has more than a page can show
	Lines   int             // steps in the file
	Plan    *Plan           // nil: no plan.json
	Slices  []metrics.Slice // of steps, and of the first ranks of the trace
	Traced  int             // ranks of the trace
	Missing []string        // files that are absent or cannot be read, and the figures that need them
}

const points = 2000

// Write writes the page. Where all points of all runs make it longer than MaxPage, it has fewer of
// them, and says so.
func Write(w io.Writer, in Input) error {
	for n := points; ; n /= 2 {
		var page bytes.Buffer
		if err := render(&page, in, build(in, n)); err != nil {
			return fmt.Errorf("report: %w", err)
		}
		if page.Len() <= MaxPage {
			_, err := w.Write(page.Bytes())
			return err
		}
		if n < 20 {
			return fmt.Errorf("report: the page would have %d bytes, of which %d are allowed; name fewer runs",
				page.Len(), MaxPage)
		}
	}
}

func build(in Input, n int) *page {
	p := &page{Title: in.Title}
	if e := in.Experiment; e != nil {
		p.experiment(e, in.Plans)
	}
	if len(in.Runs) > 0 {
		p.runs(in.Runs, n)
	}
	return p
}

//go:embed assets/page.html assets/page.css assets/*.js
var assets embed.FS

func asset(name string) string {
	data, err := assets.ReadFile("assets/" + name)
	if err != nil {
		panic(err) // it was there when this was built
	}
	return string(data)
}

// scripts are the library and those that use it, in this order.
var scripts = []string{"echarts.min.js", "format.js", "series.js", "chart.js", "table.js", "figure.js"}

var layout = template.Must(template.New("page").Parse(asset("page.html")))

// render writes the page: text goes through html/template, data through JSON, which writes <, > and & in
// escapes. The policy lets the browser run what has the hash of our scripts, and fetch nothing.
func render(w io.Writer, in Input, p *page) error {
	data, err := json.Marshal(p)
	if err != nil {
		return err
	}
	style := asset("page.css")
	policy := []string{"default-src 'none'", "img-src data: blob:", "base-uri 'none'", "form-action 'none'",
		"style-src " + hash(style)}
	allowed := "script-src"
	var code []template.HTML
	for _, name := range scripts {
		js := asset(name)
		allowed += " " + hash(js)
		code = append(code, template.HTML("<script>"+js+"</script>"))
	}
	policy = append(policy, allowed)
	return layout.Execute(w, map[string]any{
		"Page": p, "In": in, "Policy": strings.Join(policy, "; "),
		"Style":   template.HTML("<style>" + style + "</style>"),
		"Data":    template.HTML(`<script type="application/json" id="data">` + string(data) + "</script>"),
		"Scripts": code, "Sections": p.sections(), "Files": p.files(),
	})
}

// hash returns the name of an inline script or style in a policy.
func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

type section struct {
	Name, ID string
	Figures  []*figure
}

func (p *page) sections() []section {
	var all []section
	for _, f := range p.Figures {
		if len(all) == 0 || all[len(all)-1].Name != f.Section {
			all = append(all, section{Name: f.Section,
				ID: "section-" + strings.ReplaceAll(strings.ToLower(f.Section), " ", "-")})
		}
		last := &all[len(all)-1]
		last.Figures = append(last.Figures, f)
	}
	return all
}

// A file is a download with a link that was made here and is let through as it is.
type file struct {
	Name, Says string
	Link       template.URL
}

func (p *page) files() (all []file) {
	for _, d := range p.Files {
		all = append(all, file{d.Name, d.Says, template.URL(d.Data)})
	}
	return all
}
