// Package report writes one HTML page about runs or an experiment. The page needs no network and has at most
// MaxPage bytes. Its figures are JSON (figure.go) that Apache ECharts draws in the browser:
//
//	in := report.Input{Title: "opticks"}
//	err := in.Open("runs/opticks-20261120-101500")
//	err = report.Write(file, in)
//
// Names, errors and commands are untrusted input. They reach the page as escaped text or JSON only.
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
	Title  string
	Commit string // the version of cprun that writes the page

	Experiment *experiment.Results // nil: none
	// Plans holds the plan.json of cells, by ID. A cell without one is not in the roofline.
	Plans map[string]*Plan
	Runs  []Run
}

// A Run is the content of a run directory.
type Run struct {
	Name    string // unique on the page
	Command string // the last command that started or resumed the run; "" without a log
	Commit  string
	Machine string
	Ended   string // "done", or "" for a run that goes on or was killed

	Steps   []metrics.Step  // ascending; at most maxSteps of the file
	Lines   int             // steps in the file
	Plan    *Plan           // nil: no plan.json
	Slices  []metrics.Slice // the trace of the first maxLanes ranks
	Traced  int             // ranks in the trace
	Missing []string        // files that are absent or damaged, with the figures that need them

	suffix string // of titles: ", NAME" if the page has several runs
}

const points = 2000

// Write writes the page. If all points do not fit MaxPage, it leaves out some of each run and adds a note.
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
		panic(err) // embedded at build time
	}
	return string(data)
}

// scripts lists the library first, then the scripts that use it.
var scripts = []string{"echarts.min.js", "format.js", "series.js", "chart.js", "table.js", "figure.js"}

var layout = template.Must(template.New("page").Parse(asset("page.html")))

// render writes the page. html/template escapes text, and JSON escapes <, > and & in data. The content security policy
// allows only our scripts, by their hashes, and no requests.
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
		"Scripts": code, "Sections": p.sections(),
	})
}

// hash returns the policy source of an inline script or style.
func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

type section struct {
	Name, ID string
	Figures  []*figure
}

func (p *page) sections() (all []section) {
	for _, figures := range groups(p.Figures, func(f *figure) string { return f.Section }) {
		name := figures[0].Section
		all = append(all, section{name, "section-" + strings.ReplaceAll(strings.ToLower(name), " ", "-"), figures})
	}
	return all
}
