"""Makes the word list of `groupwise.usmle.medical_words`: words of ICD-10-CM that are not ordinary English.

Usage, with the texts in the folder DATA::

    python tools/medical_words.py DATA/icd10cm_words.txt --ordinary DATA/gsm8k_train.jsonl DATA/creative_prompts.jsonl \
        DATA/llamafactory_dpo_en_demo.json DATA/hh_harmless_base_test.jsonl.gz --out groupwise/usmle/medical_words.txt

ICD-10-CM is a work of the US government and in the public domain. Words of its descriptions are left out if they are
short, occur in the ordinary texts, or are in GENERAL; the words in ADDED are added.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
import zlib
from collections import Counter
from pathlib import Path

SHORTEST = 5  # letters; shorter words are rarely terms, and often ambiguous abbreviations
ORDINARY_FROM = 2  # occurrences; most words that 3 would add are ordinary

# Rare in ordinary texts, but not medical terms: words of accidents and circumstances, chemicals, names of people and
# places, parts of compounds. "Diagnosis" is here because any answer to a medical question may contain it.
GENERAL = """
    abandonment abnormal abnormality abuser accretions acculturation acquaintance activating adequacy adherent
    adolescence adoptive adultcare aerobic aerobics aerosol airgun alighting aliphatic alkali alkalis allied
    alpine alteration amines aminoderivatives amphibian analogs analogues anemone angular animate anomalous
    antecedent antipersonnel antisocial apathy apparatus apparel appendage appendico aqueduct aqueous argyll
    aromatic articulation artillery asbestos ascent aspirator asymmetric asymmetry atlanto attrition atypical
    australis auxiliary awaiting axial balcony balkan barracks barre barth barton bather bauxite bayonet becker
    benzene bifurcation binding binocular biochemical biogenesis biologic biomechanical bisexual blast blasting
    blighted blockers boarder boiler bomber boogie bottomed boutonni bovine bowing bowman branched brawl brawny
    brazilian brill bulbous bulking bumped bumping bungee buzzi bystander cacna cadmium caisson calcerous
    calisthenics canoeing carbonic caregiver caregiving cartilagenous cataclysmic causality cellular centrally
    centrifugal cessation charc cheerleading chiefly chignon childcare chimera chimeric chlorofluorocarbons
    chromium cinema circulating circumstantial classifiable cleats closure cloudy cloverleaf coalworker collateral
    colliding compensatory complement concentric concretions conduction conductive conflagration congeners congo
    conjoined connective constitutional constriction contaminated continua contraction conveyance corporo
    correspondence corrosion corrosive crest crimean crocodile crowding crystallina ctnnb curvature cutem cyclic
    cyclist dagger dander defiant deficient deformed deforming demoralization depleted derailment dermato
    detachment developmental deviated diagnosis dichloromethane digestants dilution diminished dimple disablement
    discontinuity discord discordant discrepancy disorganized displaced disproportion disruptive dissociated
    disulfide dormitory drainage draining dribbling duffy eaton effector effluent electro elongation embankment
    emptying enamel entrapment epididymo episodic equatorial equine eruption escalator esters estrangement
    evasiveness evoked exceptionally excitation excori exertion exfoliation exogenous expectant exploding
    expulsive fancier fatty feared fiberglass figurate filamentary flatback flecks fluency fluke fluorine flushing
    focal formaldehyde foundling freckles fugue fulminating fungicides fused fusel fusion fussy gaseous gastro
    girdle glare glasgow glider gliding gouti granular graphite gravitation grilling guardian gymnastics gyrate
    halogen halogenated handcrafts harlequin harvester healed heelies herbicides hesitancy heterogeneous hgsil
    hiatus hoffman homicidal homologues horseplay hostilities hostility hotplate hourglass humanus humidifier
    hurst hutchinson hydrocarbons ideations illiteracy immaturity immersion impaired impulsiveness inaccessibility
    inadvertent inanimate inattentive inborn incarceration incidental incipient incline incompetence
    incomprehensible indeterminate indigenous induction inexplicable infancy infant infrared infrasound inlet
    inline inorganic insecticides insensitivity instabilities interarch internally interstate intra intractable
    involuntary involuted ionizing irreversible irritability irritable irritant isomerism isotopes jakob jammed
    janus junction juvenile kabuki kayak kayaking keyboarding kienb labyrinthine lambert lamppost landslide latus
    laurence leaflet leakage lgsil ligneous limbed literacy localized lodgers longitudinal loosening louse macaw
    macleod magna magnum maladjustment mallet maltreatment maltworker mammalian manganese manhandling manhole
    mantle marginal mediated metalworking microlight microscopic milker milking minimally misadventure
    misalignment misdirection mismatched misshapen missile modulators molybdenum morbidly mottled mudslide
    multiplex munitions mutilation nelson nervousness nightmare nightwear nitroderivatives nkhhc nonadministration
    nonbiological noncollision noncompliance nondominant nonionizing nonmagnetic nonmedicinal nonmotor
    nonmotorized nonpowered nonprivate nonprocreative nonprogressive nonspeaking nonthermal nontoxic nontraffic
    nonvenomous norwalk notched noxious nursemaid nursing oblique obscuring obsessional obstructed obstructing
    occipito occupational occupying opacities opacity oppositional orbit orbital originating osteo overactive
    overactivity overboard overexertion overfeeding overfill overgrowth overhanging overlapping overload
    overpressure overprotection overturning overuse oxides palindromic parachutist parieto parkway paternity
    pecked peculiar percentile periodic periodica periumbilic persecution persisting pervasive petit phenol
    phonological pigment pigmented pilates pinched plateau pneumatic pollen pontiac portuguese prebirth
    precipitate precipitous precocious predominant premature preoccupation preparatory pressurized presumed primus
    principally procreation procreative proliferation prolonged propanol propeller protectants provisional prune
    pseudo psittacines psychophysical puckering pulsating purging quadra quadrant quadruplet qualitative quard
    quills quintuplet radiators radiofrequency radon rappelling reactivity reassignment reattached reattachment
    receptive recluse reconstitution reconstructed reconstructive recruitment refereeing refractive refusal
    regaining regressed reinsertion remediable remedies remedying residual responder restless restlessness
    restorative restricting retained retardation retracted reversal reversible rhomboid rhythmic richardson ritual
    rivalry robertson rocio rodenticides salpingo salter sandflea sandfly saucepan sayre scaffolding scalded
    scanty scapegoating scarring scholastic scooter scratched seafood sealant segmental selenium selvagem septo
    sequestration serrated sextuplets shaft shaken sheath shellfish shipyard shortening shortness showering
    shuddering shunting sidewall silica simian situational skillet sledder slipped slowness slurred smear
    snowboard snowboarder snowmobile solute spatial spheroids spontaneous spotting spousal springboard squash
    staining stampede stature steele stepbrother stepfather stepmother stepparent stepped stepping stepsibling
    stepsister stiff stiffness stimulation stimulator straining strauss streak streetcar strenuous stroller
    structurally stumbling stump stung subclasses submersion subtype supernumerary supersonic supplementary
    surfacing suspiciousness systemically taipan tanning tearing tetrachloride tetrachloroethylene thallium
    thermal thickening thorns thunderclap thunderstorms tidalwave tobogganing tonic topically torpedo tortuosity
    tortuous torus totalis tracheo traction trampolining transcription transitional transitory translational
    translucency transporter transposition transverse trapezium trench triad tributary trichloroethylene tubulo
    ultralight ultrasonic ultraviolet unavailability uncomplicated uncongenial uncontrolled unconventional
    underachievement underdevelopment underfeeding underfill underweight undetermined undifferentiated unifocal
    universalis unpowered unqualified unrepairable unrestricted unsheltered unspecified unsteadiness unusually
    uranium uretero ussler utero vanadium vanishing vaping vegetative venezuelan venomous verbosity vermilion
    vernal vertebro vesico vestibule vibratory viscosity vitro volcanic waldenstr wandering wasps watercraft
    waterhouse webbed webbing weber weightless weightlessness welding windsurfing workbench workmates zoological
"""

ADDED = {
    "also in ordinary texts": """
        abdominal allergic allergies allergy anorexia antibiotic antibodies anticoagulant antiviral appendix arteries
        artery arthritis asthma bacterial benzodiazepine cancer cardiac cardiovascular chronic coagulation coronavirus
        cortex diabetes diabetic diarrhea ebola epidemic esophagus femur fentanyl fibrosis fracture gastrointestinal
        glucose headache hemoglobin herpes hormone hypoxia immunoglobulin infection infectious influenza inhalation
        insulin kidney laxative malaria migraine narcolepsy nasal nausea neurological nodule norepinephrine obesity
        occlusion opiate opioid overdose palpitation pediatric pituitary postmenopausal prostate psychiatric receptor
        respiratory resuscitation rheumatoid schizophrenia sedation sedative seizure spleen strabismus surgical
        swelling syndrome thigh toxin tuberculosis tumor tympanic uterine uterus vaccination vaccine varicella
        vomiting warfarin zoster
    """,
    "singular of a plural in ICD-10-CM": """
        adenoid agonist allergen aminoglycoside amphetamine anticholinergic antidepressant antimalarial antiplatelet
        antipsychotic arteriole autoantibody autosome bisphosphonate cannabinoid cephalosporin convulsion cyst
        delusion diuretic expectorant hallucination hemorrhoid infarct macrolide mineralocorticoid neutrophil papule
        phosphatase quinolone relaxant salicylate sulfonamide tetracycline vasodilator wart
    """,
    "symptoms and signs": """
        afebrile bradycardic bradypnea crackles crepitus diaphoresis dysmetria emesis fatigue hepatosplenomegaly
        holosystolic hyperreflexia hyporeflexia hypotensive icterus lethargy numbness petechiae photophobia pleuritic
        rales rhinorrhea rhonchi somnolent tachycardic tachypneic
    """,
    "tests and what they measure": """
        aldosterone aminotransferase amylase angiogram angiography auscultation bicarbonate biopsies biopsy
        colonoscopy colposcopy cortisol creatinine cytology dimer echocardiogram echocardiography electrocardiography
        endoscopy eosinophil ferritin fibrinogen haptoglobin histology hypercoagulable lactate lipase macrophage
        monocyte natriuretic oximetry palpation prolactin radiograph renin reticulocyte serology spirometry
        thromboplastin thyrotropin tomography transferrin triglyceride troponin ultrasonography ultrasound urinalysis
    """,
    "drugs and their classes": """
        acetaminophen acyclovir adrenaline albuterol allopurinol alprazolam alteplase amiodarone amitriptyline
        amlodipine amoxicillin ampicillin antihistamine antiretroviral atenolol atorvastatin atropine azithromycin
        bupropion captopril carbamazepine ceftriaxone ciprofloxacin clindamycin clonazepam clopidogrel clozapine
        colchicine corticosteroid cyclophosphamide cyclosporine dexamethasone diazepam digoxin diphenhydramine
        dobutamine dopamine doxycycline enalapril enoxaparin epinephrine erythromycin escitalopram fluconazole
        fluoxetine furosemide gabapentin gentamicin haloperidol hydrochlorothiazide hydrocortisone hydroxyurea
        ibuprofen infliximab ipratropium isoniazid ketamine labetalol levodopa levofloxacin levothyroxine lidocaine
        lisinopril lithium lorazepam losartan metformin methimazole methotrexate metoprolol metronidazole midazolam
        morphine naloxone naproxen nifedipine nitrofurantoin olanzapine omeprazole ondansetron oxytocin paracetamol
        phenytoin prednisone propofol propranolol propylthiouracil ramipril rifampin risperidone rituximab
        rosuvastatin sertraline sildenafil simvastatin spironolactone statin sulfamethoxazole sumatriptan tacrolimus
        tamoxifen tamsulosin testosterone theophylline thiazide trimethoprim valproate vasopressin vasopressor
        verapamil
    """,
    "diagnoses, anatomy and procedures": """
        adenocarcinoma adenoma appendectomy bronchoscopy comorbidity dyslipidemia excision glioma hypothalamus
        intramuscular ipsilateral laparoscopy laparotomy metastasis metastatic myocardium neonate nephrolithiasis
        paracentesis pathogen pathogenesis pathophysiology percutaneous pheochromocytoma phototherapy plasmapheresis
        postoperative preeclampsia prenatal prognosis resection splenectomy thrombus thyroidectomy toxicity
    """,
    "British spellings": """
        anaemia anaesthesia caesarean diarrhoea dyspnoea haematuria haemoglobin haemorrhage hyperglycaemia
        hyperkalaemia hypoglycaemia hypokalaemia hyponatraemia ischaemia ischaemic leukaemia oedema oesophageal
        oesophagus oestrogen paediatric septicaemia tumour
    """,
}


def words_in(path: Path) -> Counter[str]:
    """Counts of the lower-case words of a text or JSON file, which may be compressed."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    text = content.decode("utf-8").replace("\\n", " ")  # JSON's line break would become part of the next word
    return Counter(re.findall(r"[a-z]+", text.lower()))


def singulars(word: str) -> list[str]:
    """Possible singulars of the word."""
    return [word.removesuffix(ending) for ending in ("s", "es") if word.endswith(ending)]


def is_ordinary(word: str, ordinary: Counter[str]) -> bool:
    """Whether the word, its singular or its plural occurs in ordinary texts."""
    return sum(ordinary[form] for form in {word, f"{word}s", f"{word}es", *singulars(word)}) >= ORDINARY_FROM


def medical_words(icd: Counter[str], ordinary: Counter[str]) -> list[str]:
    """The sorted list, without plurals whose singular is in it; lookups try the singular."""
    general = set(GENERAL.split())
    words = {
        word
        for word in icd
        if len(word) >= SHORTEST and general.isdisjoint({word, *singulars(word)}) and not is_ordinary(word, ordinary)
    }
    words.update(word for group in ADDED.values() for word in group.split())
    return sorted(word for word in words if words.isdisjoint(singulars(word)))


def header(icd: Path, ordinary: list[Path], out: Path) -> str:
    """The header of the list: its source, with file names only."""
    texts = " ".join(path.name for path in ordinary)
    return (
        "# Words of the descriptions of ICD-10-CM (a work of the US government, public domain), and some more.\n"
        f"# Made by: python tools/medical_words.py {icd.name} --ordinary {texts} --out {out.name}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the list of medical words.")
    parser.add_argument("icd", type=Path, help="words of the descriptions of ICD-10-CM, one per line")
    parser.add_argument("--ordinary", type=Path, nargs="+", required=True, help="ordinary English texts, may be .gz")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    arguments = parser.parse_args()
    ordinary: Counter[str] = Counter()
    try:
        for path in arguments.ordinary:
            ordinary.update(words_in(path))
        words = medical_words(words_in(arguments.icd), ordinary)
        text = header(arguments.icd, arguments.ordinary, arguments.out) + "".join(f"{word}\n" for word in words)
        arguments.out.write_text(text, encoding="utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        parser.error(str(error))
    sys.stdout.write(f"{len(words):,} words in {arguments.out}\n")


if __name__ == "__main__":
    main()
