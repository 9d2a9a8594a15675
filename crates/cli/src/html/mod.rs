//! Pages that need nothing but a browser: their frame, their look, and the file they are written to.

mod date;
mod file;

pub(crate) use date::now;
pub(crate) use file::PageFile;

/// The look that all pages have.
const STYLE: &str = include_str!("page.css");

/// A whole page: its title, the style that only it has, and what is in its body.
pub(crate) fn document(title: &str, style: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{STYLE}{style}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )
}

/// A list of facts: names, and what is known; what is not known is left out.
pub(crate) fn facts(facts: &[(&str, &str)]) -> String {
    let line = |(name, text): &(&str, &str)| format!("<dt>{}</dt><dd>{}</dd>\n", escape(name), escape(text));
    let known: String = facts.iter().filter(|(_, text)| !text.is_empty()).map(line).collect();
    format!("<dl>\n{known}</dl>\n")
}

/// Text as HTML shows it.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            letter => safe.push(letter),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_no_markup() {
        assert_eq!(escape("<a href=\"x\">&</a>"), "&lt;a href=&quot;x&quot;&gt;&amp;&lt;/a&gt;");
        let page = document("<b>", "", "");
        assert!(page.contains("<title>&lt;b&gt;</title>") && page.ends_with("</html>\n"), "{page}");
    }

    #[test]
    fn what_is_not_known_is_no_fact() {
        assert_eq!(facts(&[("a", "<"), ("b", "")]), "<dl>\n<dt>a</dt><dd>&lt;</dd>\n</dl>\n");
    }
}
