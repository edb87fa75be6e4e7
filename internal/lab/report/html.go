package report

import (
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"encoding/json"
	"html/template"
	"io"
	"strings"
)

//go:embed assets/page.html assets/page.css assets/*.js
var assets embed.FS

// asset returns an embedded file.
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
	policy := []string{"default-src 'none'", "img-src data: blob:", "base-uri 'none'", "form-action 'none'", "style-src " +
		hash(style)}
	allowed := "script-src"
	var code []template.HTML
	for _, name := range scripts {
		js := asset(name)
		allowed += " " + hash(js)
		code = append(code, template.HTML("<script>"+js+"</script>"))
	}
	policy = append(policy, allowed)
	return layout.Execute(w, map[string]any{
		"Page": p, "In": in, "Policy": strings.Join(policy, "; "), "Style": template.HTML("<style>" + style + "</style>"),
		"Data": template.HTML(`<script type="application/json" id="data">` + string(data) + "</script>"), "Scripts": code,
		"Sections": p.sections(), "Files": p.files(),
	})
}

// hash returns the name of an inline script or style in a policy.
func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// A section is figures under a heading.
type section struct {
	Name, ID string
	Figures  []*figure
}

func (p *page) sections() []section {
	var all []section
	for _, f := range p.Figures {
		if len(all) == 0 || all[len(all)-1].Name != f.Section {
			all = append(all, section{Name: f.Section, ID: "section-" + strings.ReplaceAll(strings.ToLower(f.Section), " ",
				"-")})
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
